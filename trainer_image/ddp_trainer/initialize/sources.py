"""Where data comes from: a web server, an object store, a hub of data sets, or a volume that is mounted here.

Web servers are asked with the standard library. All else is a file system of fsspec's, which torch itself brings; the
drivers for s3:// (obstore) and hf:// (huggingface_hub) are what ddpjob[data] adds, and in our trainer image.
"""

from __future__ import annotations

import string
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ddp_trainer.contract.addresses import public, shown
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.initialize.mounted import mounted_files

CHUNK_BYTES = 8 << 20
SILENCE_SECONDS = 60.0
"""How long a server may send nothing."""

_PERMANENT = (400, 401, 403, 404, 405, 410, 451)
"""Answers that stay the same however often one asks (RFC 9110 section 15.5)."""

_WHOLE = (200, 203)
"""Answers that come with all data; 202 and 204 come with none, though they count as success (RFC 9110 section 15.3)."""


class FetchError(Exception):
    """Something did not arrive, or not whole; it may the next time. The message says what."""


def fetch(source: str, into: Path, pvcs: Path) -> None:
    """Copy what `source` names to `into`, which does not exist yet: a file, or a folder with all files below it.

    Args:
        source: https://…, http://…, s3://bucket/key, hf://datasets/owner/name or pvc://claim/path.
        into: where it goes; its parent exists.
        pvcs: the folder in which PersistentVolumeClaims are mounted, each under its name.

    Raises:
        UserError: there is no such source, no right to read it, or no driver for it.
        FetchError: it could not be read to its end.
        OSError: it cannot be written.
    """
    scheme, _, rest = source.partition("://")
    if scheme in ("http", "https"):
        _download(source, into)
        return
    try:
        files, root = _file_system(scheme, rest, pvcs)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{scheme}:// needs a package that this image lacks ({error}); add ddpjob[data] to the image"
        ) from None
    copy_tree(files, root.rstrip("/"), into, public(source))


def _file_system(scheme: str, rest: str, pvcs: Path) -> tuple[Any, str]:
    """One of fsspec's, and a path in it. Imports come late: a web server needs none of them."""
    import fsspec

    if scheme == "pvc":
        return fsspec.filesystem("file"), str(pvcs / rest)
    if scheme == "s3":
        from obstore.fsspec import register

        register("s3")  # fsspec itself would look for s3fs
    files, root = fsspec.core.url_to_fs(f"{scheme}://{rest}")
    return files, str(root)


def copy_tree(files: Any, root: str, into: Path, source: str) -> None:
    """Copy a file, or a folder with all files below it, from any of fsspec's file systems.

    Raises as `fetch` does.
    """
    try:
        if not files.isdir(root):
            info = files.info(root)
            if info.get("type") == "other":  # a pipe, say, which nobody may ever write to
                raise UserError(f"{source} is neither a file nor a folder; correct the source")
            _copy_file(files, root, info.get("size"), into)
            return
        found = _files_below(files, root, source)
        if not found:
            raise UserError(f"{source} is empty; correct the source")
        for path, size in sorted(found.items()):
            _copy_file(files, path, size, into / _relative(path, root))
    except FileNotFoundError:
        token = ", or its token (HF_TOKEN)" if source.startswith("hf://") else ""  # the hub hides what is private
        raise UserError(f"there is no {source}; correct the source{token}") from None
    except (UserError, FetchError):
        raise
    except Exception as error:  # every client has errors of its own
        name = error.filename if isinstance(error, OSError) else None
        if name is not None and Path(str(name)).is_relative_to(into.parent):
            raise  # ours: the volume is full, say
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if _not_allowed(error):
            fix = "check the credentials in the initializer's env"
            if _is_mounted(files):
                fix = "give the pods a user or a group that may, in securityContext of spec.podTemplate.spec"
            raise UserError(f"{source} may not be read ({said}); {fix}") from None
        raise FetchError(f"{source}: {said}") from error


def _files_below(files: Any, root: str, source: str) -> dict[str, int | None]:
    """Sizes by path. A part that cannot be read is an error: half a data set must not pass for a whole one."""
    if _is_mounted(files):  # whose own search leaves out what it cannot read
        return mounted_files(root, source)
    found = files.find(root, detail=True)
    # consoles of object stores make an empty object in the place of each folder
    folders = {root, *(str(parent) for path in found for parent in PurePosixPath(path).parents)}
    return {path: info.get("size") for path, info in found.items() if info.get("size") or path not in folders}


def _is_mounted(files: Any) -> bool:
    return "file" in files.protocol


def _not_allowed(error: Exception) -> bool:
    """Whether a store denies access. Only the file system of this machine says so by PermissionError."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    of_obstore = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    return isinstance(error, PermissionError) or of_obstore or code in (401, 403)


def _copy_file(files: Any, path: str, size: int | None, into: Path) -> None:
    into.parent.mkdir(parents=True, exist_ok=True)
    with files.open(path, "rb") as read:
        _write(read, into)
    got = into.stat().st_size
    if size is not None and got != size:
        raise FetchError(f"{shown(path)}: {got} bytes came of {size}")


def _relative(path: str, root: str) -> Path:
    relative = Path(path.removeprefix(root).lstrip("/"))
    if not path.startswith(f"{root}/") or ".." in relative.parts:
        raise FetchError(f"{shown(path)} is not inside {shown(root)}")
    return relative


def _download(url: str, into: Path) -> None:
    request, source = _request(url), public(url)
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as answer:  # noqa: S310 - http or https alone
            if answer.status not in _WHOLE:
                raise FetchError(f"{source} answered {answer.status} {answer.reason}, which is not the whole of it")
            _write(answer, into)
            _check_length(answer.headers, into, source)
    except urllib.error.HTTPError as error:
        said = f"{source} answered {error.code} {error.reason}"
        if error.code in _PERMANENT:
            raise UserError(f"{said}; correct the source or its access") from None
        raise FetchError(said) from None
    except urllib.error.URLError as error:
        raise FetchError(f"{source}: {error.reason}") from None
    except (HTTPException, OSError, UnicodeError) as error:
        if getattr(error, "filename", None) is not None:
            raise  # ours: the volume is full, say
        raise FetchError(f"{source}: {type(error).__name__}: {error}") from error


def _request(url: str) -> urllib.request.Request:
    """As a browser asks for `url`: its user and password in a header, what ASCII has not in percent codes."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = parts.port
    except ValueError:  # without its words, which may be a part of the password
        raise UserError(f"{public(url)} is no address of a web server; correct the source") from None
    if not host:
        raise UserError(f"{public(url)} names no host; correct the source")
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    request = urllib.request.Request(  # noqa: S310
        urlunsplit((parts.scheme, place, path, query, "")),
        headers={"User-Agent": "ddpjob", "Accept-Encoding": "identity"},
    )
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        # not for the place that this one may name
        request.add_unredirected_header("Authorization", f"Basic {b64encode(user.encode()).decode()}")
    return request


def _write(read: IO[bytes], into: Path) -> None:
    with into.open("wb") as file:
        while chunk := read.read(CHUNK_BYTES):
            with _named(into):
                file.write(chunk)
                file.flush()
        with _named(into):
            file.close()  # where NFS says that the volume is full


@contextmanager
def _named(into: Path) -> Iterator[None]:
    """Errors with the name of the file: it tells a full volume from a source that broke off."""
    try:
        yield
    except OSError as error:
        error.filename = str(into)
        raise


def _check_length(headers: HTTPMessage, into: Path, source: str) -> None:
    """A connection that breaks looks like the end: http.client reports it to no reader of pieces."""
    promised, got = headers.get("Content-Length"), into.stat().st_size
    if promised is not None and promised.isdecimal() and int(promised) != got:
        raise FetchError(f"{source}: {got} bytes came of {promised}")
