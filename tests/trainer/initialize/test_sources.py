"""Object stores and the hub of data sets, asked by the clients that our image has, over servers that speak their
protocols here: neither is to be had on a machine that is cut off.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.support.waiting import PATIENCE_SECONDS

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.initialize.sources import fetch

ROOT = Path(__file__).parents[3]
FILES = {"train/": b"", "train/deep/": b"", "train/a.bin": b"a" * 100_000, "train/deep/b.bin": b"b" * 2000}
"""With the empty objects that consoles of object stores make for folders."""
FOLDERS = ("train", "train/deep")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        parts = address.path.strip("/").split("/")
        if parts[0] == "bucket":
            self._object("/".join(parts[1:]), parse_qs(address.query))
        elif parts[:4] == ["api", "datasets", "owner", "digits"]:
            self._hub_api(parts[4:])
        elif parts[:5] == ["datasets", "owner", "digits", "resolve", "main"]:
            self._file("/".join(parts[5:]))
        else:
            self._answer(404, b"", **{"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _object(self, key: str, query: dict[str, list[str]]) -> None:
        """S3's GetObject, HeadObject and ListObjectsV2."""
        if "AWS4-HMAC-SHA256 Credential=key" not in self.headers.get("Authorization", ""):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif "list-type" not in query:
            self._file(key)
        else:
            (prefix,), (delimiter,) = query.get("prefix", [""]), query.get("delimiter", [""])
            found = [name for name in FILES if name.startswith(prefix)]
            here = [name for name in found if not delimiter or delimiter not in name.removeprefix(prefix)]
            below = {prefix + name.removeprefix(prefix).split("/")[0] + "/" for name in found if name not in here}
            contents = "".join(
                f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<Size>{len(FILES[name])}</Size></Contents>"
                for name in here
            )
            prefixes = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(below))
            listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{prefixes}</ListBucketResult>"
            self._answer(200, listing.encode())

    def _hub_api(self, parts: list[str]) -> None:
        """What huggingface.co says about a data set and its files."""
        reported: Any = {"id": "owner/digits", "sha": "0" * 40}
        if parts[:1] == ["tree"]:
            reported = [{"type": "directory", "oid": "2" * 40, "size": 0, "path": name} for name in FOLDERS]
            reported += [
                {"type": "file", "oid": "1" * 40, "size": len(body), "path": name}
                for name, body in FILES.items()
                if body
            ]
        self._answer(200, json.dumps(reported).encode())

    def _file(self, name: str) -> None:
        body = FILES.get(name)
        if body is None:
            self._answer(404, b"")
            return
        if (wanted := self.headers.get("Range")) is None:
            self._answer(200, body)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = body[int(first) : int(last or len(body)) + 1]
        where = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
        self._answer(206, part, **{"Content-Range": where})

    def _answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        reported = {"Content-Length": str(len(body)), "ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        for name, value in (reported | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def initialize(source: str, server: str, folder: Path, **environment: str) -> tuple[int, dict[str, Any] | None]:
    """Exit code and termination message of an initializer that puts `source` at `data` below the folder."""
    log = folder / "termination-log"
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS_", "HF_", "HTTP"))}
    settings = {
        "PYTHONPATH": str(ROOT / "trainer_image"),
        "DDPJOB_SHARED": str(folder),
        "DDPJOB_TERMINATION_LOG": str(log),
        "DDPJOB_INITIALIZER": json.dumps({"name": "data", "path": "data", "source": source}),
        "HOME": str(folder / "home"),
        "HF_ENDPOINT": server,
        "AWS_ENDPOINT_URL": server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ddp_trainer.initialize"], env=own | settings | environment, timeout=PATIENCE_SECONDS
    )
    return done.returncode, json.loads(log.read_text()) if log.exists() else None


@pytest.mark.parametrize("source", ["s3://bucket/train", "hf://datasets/owner/digits/train"])
@pytest.mark.processes
def test_a_folder_arrives_whole(source: str, server: str, tmp_path: Path) -> None:
    assert initialize(source, server, tmp_path)[0] == 0
    found = {str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert found == {"a.bin", "deep/b.bin"}
    assert (tmp_path / "data" / "a.bin").read_bytes() == FILES["train/a.bin"]
    assert (tmp_path / "data" / "deep" / "b.bin").read_bytes() == FILES["train/deep/b.bin"]


@pytest.mark.parametrize("source", ["s3://bucket/train/a.bin", "hf://datasets/owner/digits/train/a.bin"])
@pytest.mark.processes
def test_a_file_arrives_whole(source: str, server: str, tmp_path: Path) -> None:
    assert initialize(source, server, tmp_path)[0] == 0
    assert (tmp_path / "data").read_bytes() == FILES["train/a.bin"]


@pytest.mark.parametrize("source", ["s3://bucket/none", "hf://datasets/owner/none", "hf://datasets/owner/digits/none"])
@pytest.mark.processes
def test_what_is_not_there_is_the_users_to_correct(source: str, server: str, tmp_path: Path) -> None:
    code, message = initialize(source, server, tmp_path)
    assert code == 64
    assert message is not None
    assert f"there is no {source}; correct the source" in message["message"]


@pytest.mark.processes
def test_wrong_credentials_are_named_as_what_they_are(server: str, tmp_path: Path) -> None:
    code, message = initialize("s3://bucket/train", server, tmp_path, AWS_ACCESS_KEY_ID="wrong")
    assert code == 64
    assert message is not None
    assert "s3://bucket/train may not be read" in message["message"]
    assert "check the credentials in the initializer's env" in message["message"]


@pytest.mark.parametrize(
    ("source", "package"), [("s3://bucket/key", "obstore.fsspec"), ("hf://datasets/a/b", "huggingface_hub")]
)
def test_an_image_without_the_client_names_what_to_add(
    source: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"needs a package that this image lacks .*; add ddpjob\[data\] to the image"):
        fetch(source, tmp_path / "data", tmp_path)
