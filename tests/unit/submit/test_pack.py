"""A folder of code: what is sent, what is left out, and that it comes back as it was."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import subprocess
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ddp_trainer.launch.code_archive import digest as digest_of_trainer
from ddpjob_operator.api.pod import MOST_CODE_PARTS
from ddpjob_operator.submit import pack as packing
from ddpjob_operator.submit.pack import BadCode, digest, name_of, pack, unpack


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    write(made, **{"train.py": "import pkg", "pkg/__init__.py": "", "configs/größe.yaml": "a: 1"})
    (made / "run.sh").write_text("#!/bin/sh")
    (made / "run.sh").chmod(0o755)
    return made


def test_what_is_packed_comes_back(folder: Path) -> None:
    packed = pack(folder)
    files = unpack(packed.parts)
    assert {(file.path, file.mode, file.content.decode()) for file in files} == {
        ("train.py", 0o644, "import pkg"),
        ("pkg/__init__.py", 0o644, ""),
        ("configs/größe.yaml", 0o644, "a: 1"),
        ("run.sh", 0o755, "#!/bin/sh"),
    }
    assert packed.paths == {file.path for file in files}
    assert digest(files) == packed.sha256
    assert packed.left_out == ()


@pytest.mark.processes
def test_the_same_files_make_the_same_bytes_wherever_and_whenever_they_are_packed(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", folder, again], check=True)
    os.utime(again / "train.py", (0, 0))
    assert (pack(again).sha256, pack(again).parts) == (pack(folder).sha256, pack(folder).parts)


@pytest.mark.parametrize("change", ["content", "mode", "name"])
def test_every_change_changes_the_digest(folder: Path, change: str) -> None:
    before = pack(folder)
    if change == "content":
        (folder / "train.py").write_text("import gkp")
    elif change == "mode":
        (folder / "train.py").chmod(0o755)
    else:
        (folder / "train.py").rename(folder / "main.py")
    after = pack(folder)
    assert after.sha256 != before.sha256
    assert name_of(after.parts[0]) != name_of(before.parts[0])


def test_both_sides_mean_the_same_by_the_digest(folder: Path) -> None:
    packed = pack(folder)
    listed = {file.path: (file.mode, hashlib.sha256(file.content).hexdigest()) for file in unpack(packed.parts)}
    assert digest_of_trainer(listed) == packed.sha256


GIT = {
    ".gitignore": "*.log\n/data/\n!keep.log\nout/*\n!out/kept.txt\n# a comment\n",
    "pkg/.gitignore": "generated.py\n!special.log\n",
    "a.log": "", "keep.log": "", "data/x.bin": "", "pkg/data/y.bin": "", "pkg/generated.py": "", "generated.py": "",
    "pkg/special.log": "", "pkg/other.log": "", "out/lost.txt": "", "out/kept.txt": "", "train.py": "", "data2/z": "",
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("below", ["", "pkg"])
def test_what_git_ignores_is_left_out(tmp_path: Path, below: str) -> None:
    """Also what the .gitignore of a folder above says, if that is in the same repository."""
    write(tmp_path, **GIT)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    kept = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=tmp_path / below,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert pack(tmp_path / below).paths == set(kept)
    assert len(kept) >= 3


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", folder, "-c", "user.name=Ann", "-c", "user.email=ann@example.com", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.processes
@pytest.mark.parametrize("below", ["", "pkg"])
@pytest.mark.parametrize("place", ["clone", "worktree", "configured"])
def test_what_git_ignores_in_this_clone_or_for_this_user_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, below: str
) -> None:
    clone = top = tmp_path / "clone"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    git(tmp_path, "init", "-q", str(clone))
    (clone / ".git" / "info").mkdir(exist_ok=True)
    users = tmp_path / ("mine" if place == "configured" else "git/ignore")
    write(tmp_path, **{"clone/.git/info/exclude": "private/\n/first.txt\n!kept.note\n"})
    write(tmp_path, **{users.relative_to(tmp_path).as_posix(): "*.note\nwanted.md\n"})
    if place == "configured":
        git(clone, "config", "core.excludesFile", str(users))
    if place == "worktree":
        top = tmp_path / "worktree"
        git(clone, "commit", "-q", "--allow-empty", "-m", "first")
        git(clone, "worktree", "add", "-q", str(top))
    names = ("train.py", "first.txt", "private/key.txt", "a.note", "kept.note", "wanted.md")
    write(top, **{".gitignore": "!wanted.md\n"}, **{f"{folder}{name}": "" for folder in ("", "pkg/") for name in names})
    kept = git(top / below, "ls-files", "-co", "--exclude-standard").split()
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook of another repository
    assert pack(top / below).paths == set(kept)
    assert {"train.py", "kept.note", "wanted.md"} <= set(kept)
    assert ("first.txt" in kept) == (below == "pkg")


@pytest.mark.processes
def test_where_git_is_not_installed_its_lists_are_in_their_usual_places(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pack(folder).paths
    write(folder, **{".git/info/exclude": "private.txt\n", "private.txt": "", "a.note": ""})
    write(folder.parent, **{"git/ignore": "*.note\n"})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent))
    monkeypatch.setenv("PATH", str(folder))
    assert pack(folder).paths == before


@pytest.mark.parametrize("text", ["\ufeffdata/\n", "data/\r\n", "!\ndata/\n"], ids=["a BOM", "CRLF", "no pattern"])
def test_ignore_files_are_read_as_git_reads_them(folder: Path, text: str) -> None:
    before = pack(folder).paths
    write(folder, **{"data/x": ""})
    (folder / ".gitignore").write_bytes(text.encode())
    assert pack(folder).paths == before | {".gitignore"}


def test_ddpjobignore_is_read_after_gitignore(folder: Path) -> None:
    write(folder, **{".gitignore": "*.bin\n", ".ddpjobignore": "!small.bin\nconfigs/\n", "small.bin": "", "b.bin": ""})
    assert pack(folder).paths == {"train.py", "pkg/__init__.py", "run.sh", "small.bin", ".gitignore", ".ddpjobignore"}


@pytest.mark.parametrize("listed", ["*\n!.gitignore\n", "*.bin\n"])
def test_ddpjobignore_is_read_after_each_gitignore_further_in(folder: Path, listed: str) -> None:
    """As in a folder of data that git keeps empty. The advice in the line about it had no effect."""
    write(folder, **{"data/.gitignore": listed, "data/train.bin": "", "data/val.bin": ""})
    (line,) = pack(folder).left_out
    assert line.startswith("data/train.bin, data/val.bin: ")
    write(folder, **{".ddpjobignore": "!data/train.bin\n*.yaml\n", "configs/.gitignore": "!*.yaml\n"})
    paths = pack(folder).paths
    assert "data/train.bin" in paths
    assert not {"data/val.bin", "configs/größe.yaml"} & paths


@pytest.mark.processes
def test_what_is_no_code_is_left_out(folder: Path) -> None:
    expected = pack(folder)
    write(
        folder, **{"__pycache__/train.cpython-311.pyc": "", ".git/HEAD": "", ".mypy_cache/x": "", "env/pyvenv.cfg": ""}
    )
    write(folder, **{"env/lib/torch.py": "", "shared/checkpoints/big": ""})
    assert pack(folder, exclude=[folder / "shared"]).sha256 == expected.sha256


@pytest.mark.processes
def test_a_worktree_and_a_submodule_of_git_are_the_code_that_a_clone_is(folder: Path) -> None:
    """Each has a file for a repository, with a path of this machine."""
    write(folder, **{"lib/model.py": ""})
    expected = pack(folder).sha256
    write(folder, **{".git": "gitdir: /home/ann/code/.git/worktrees/lr", "lib/.git": "gitdir: ../.git/modules/lib"})
    assert pack(folder).sha256 == expected


def test_of_a_bare_repository_in_the_folder_no_head_is_sent(folder: Path) -> None:
    write(folder, **{"model.git/HEAD": "ref: refs/heads/main\n", "model.git/config": "", "HEAD": "0" * 40})
    packed = pack(folder)
    assert {file.path for file in unpack(packed.parts)} == packed.paths
    assert {"model.git/HEAD", "HEAD"}.isdisjoint(packed.paths)
    assert packed.left_out == tuple(f"{path}: is the HEAD of a git repository" for path in ("HEAD", "model.git/HEAD"))


def test_a_folder_with_the_names_of_a_repository_is_sent_and_comes_back(folder: Path) -> None:
    paths = {"head", "objects/chair.py", "refs/x", "pkg/head/x.py", "pkg/objects/x", "pkg/refs/x", ".gitignore"}
    paths |= {".github/ci.yaml", "pkg.git.py"}
    write(folder, **dict.fromkeys(paths, "class Head"))
    write(folder, **{".gitignore": ""})
    packed = pack(folder)
    assert paths <= packed.paths
    assert {file.path for file in unpack(packed.parts)} == packed.paths


@pytest.fixture
def closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that only another user may enter, also where the tests run as root, whom nothing refuses."""
    place = folder / "pgdata"
    place.mkdir()
    scandir, stat = os.scandir, Path.stat

    def refusing_scandir(path: Any = ".") -> Any:
        if Path(path) == place:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def refusing_stat(self: Path, **options: Any) -> os.stat_result:
        if self.parent == place:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(os, "scandir", refusing_scandir)
    monkeypatch.setattr(Path, "stat", refusing_stat)
    return place


def test_a_folder_that_may_not_be_read_is_refused_and_can_be_listed(folder: Path, closed: Path) -> None:
    """Such as one that a container has made as root, or lost+found. The advice was refused for the same reason."""
    with pytest.raises(BadCode, match=f"{closed}: Permission denied; make it readable, or list it in .ddpjobignore"):
        pack(folder)
    write(folder, **{".ddpjobignore": "pgdata/\n"})
    assert pack(folder).left_out == ("pgdata/: is ignored by git or .ddpjobignore",)


def test_a_folder_that_is_ignored_is_named_and_no_cache_is(folder: Path) -> None:
    for name in ("data", "src/data", "__pycache__", ".venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("text")
    (folder / ".venv" / "pyvenv.cfg").write_text("")
    (folder / ".gitignore").write_text("data/\n*.log\n__pycache__/\n.venv/\n")
    assert pack(folder).left_out == (
        "data/: is ignored by git or .ddpjobignore",
        "src/data/: is ignored by git or .ddpjobignore; `!src/data/` in .ddpjobignore sends it",
    )


def test_data_beside_the_code_that_git_ignores_is_named_the_largest_first(folder: Path) -> None:
    write(folder, **{".gitignore": "*.bin\n*.pkl\n*.log\n.env\n", ".env": "TOKEN=1", "a.log": ""})
    write(folder, **{"data/tiny/val.bin": "x" * 20, "data/tiny/train.bin": "x" * 90, "data/tiny/meta.pkl": "x"})
    named = "data/tiny/train.bin, data/tiny/val.bin, data/tiny/meta.pkl and 1 more"
    write(folder, **{"shared2/.gitignore": "*\n", "shared2/logs/a": "", "shared2/big": "x" * 100})  # of `ddpjob run`
    listed = "are ignored by git or .ddpjobignore; `!NAME` in .ddpjobignore sends one"
    assert pack(folder).left_out == (f"{named}: {listed}",)
    write(folder, **{".ddpjobignore": "!data/tiny/train.bin\n"})
    assert "data/tiny/train.bin" in pack(folder).paths


def test_secrets_are_left_out_unless_they_are_asked_for(folder: Path) -> None:
    write(folder, **{".env": "TOKEN=1", "id_rsa": "", ".ddpjobignore": "!id_rsa\n"})
    packed = pack(folder)
    assert "id_rsa" in packed.paths
    assert packed.left_out == (".env: may be a secret; `!.env` in .ddpjobignore sends it",)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (".ssh/config", ".ssh/"), (".aws/credentials", ".aws/"), (".kube/config", ".kube/"),
        (".docker/config.json", ".docker/"), (".gnupg/trustdb.gpg", ".gnupg/"), ("pkg/.netrc", "pkg/.netrc"),
        (".git-credentials", ".git-credentials"), (".npmrc", ".npmrc"), (".pypirc", ".pypirc"),
        ("id_ecdsa", "id_ecdsa"), ("id_ed25519_sk", "id_ed25519_sk"), ("me.p12", "me.p12"),
        ("kubeconfig", "kubeconfig"),
    ],
)  # fmt: skip
def test_credentials_of_usual_tools_are_secrets(folder: Path, path: str, named: str) -> None:
    expected = pack(folder).sha256
    write(folder, **{path: "secret"})
    packed = pack(folder)
    assert packed.sha256 == expected
    pattern = named.removeprefix("pkg/")
    assert packed.left_out == (f"{named}: may be a secret; `!{pattern}` in .ddpjobignore sends it",)
    (folder / ".ddpjobignore").write_text(f"!{pattern}\n")
    assert path in pack(folder).paths


@pytest.mark.parametrize("pattern", ["!data/", "!data/**", "!*"])
def test_a_pattern_that_sends_a_folder_sends_no_secret_in_it(folder: Path, pattern: str) -> None:
    """Such as `!data/`, which a line about an ignored folder names."""
    write(folder, **{".gitignore": "data/\n", ".ddpjobignore": f"{pattern}\n"})
    write(folder, **{"data/x": "", "data/raw/.env": "TOKEN=1", "data/.aws/credentials": "", ".ssh/id_rsa": ""})
    packed = pack(folder)
    assert "data/x" in packed.paths
    assert not {"data/raw/.env", "data/.aws/credentials"} & packed.paths
    assert "data/raw/.env: may be a secret; `!.env` in .ddpjobignore sends it" in packed.left_out
    (folder / ".ddpjobignore").write_text(f"{pattern}\n!.env\n!.ssh/\n")
    assert {"data/x", "data/raw/.env", ".ssh/id_rsa"} <= pack(folder).paths


def test_a_public_key_and_a_module_of_such_a_name_are_sent(folder: Path) -> None:
    names = {"id_rsa.pub", "kubeconfig.py", "aws/credentials.py", "docker/config.json"}
    write(folder, **dict.fromkeys(names, ""))
    assert names <= pack(folder).paths


def test_links_that_lead_out_of_the_folder_are_left_out(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, **{"data/x": "", "secret": "s"})
    (folder / "data").symlink_to(tmp_path / "data")
    (folder / "secret").symlink_to(tmp_path / "secret")
    (folder / "alias.py").symlink_to(folder / "train.py")
    packed = pack(folder)
    assert "alias.py" in packed.paths
    assert not {"data/x", "secret"} & packed.paths
    assert [note.partition(":")[0] for note in packed.left_out] == ["data", "secret"]


def test_a_folder_that_ddpjob_code_wrote_is_left_out_of_the_folder_around_it_alone(folder: Path) -> None:
    expected = pack(folder)
    inner = folder / "train-code"
    write(inner, **{packing.FETCHED: "", "train.py": "import pkg", "pkg/__init__.py": ""})
    assert pack(folder).sha256 == expected.sha256
    assert pack(inner).paths == {"train.py", "pkg/__init__.py"}


def noise(folder: Path, **sizes: int) -> None:
    """Files that no compression makes smaller, in bytes."""
    for name, size in sizes.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))


def test_a_large_folder_has_several_parts_that_fit_into_config_maps(folder: Path) -> None:
    noise(folder, **{"a.bin": 700_000, "m.bin": 700_000, "z.bin": 700_000})
    packed = pack(folder)
    assert digest(unpack(packed.parts)) == packed.sha256
    assert 3 <= len(packed.parts) <= MOST_CODE_PARTS
    assert all(len(part) <= packing.MOST_PART_BYTES for part in packed.parts)


@pytest.mark.parametrize("change", ["grows", "shrinks", "is removed", "is added"])
@pytest.mark.parametrize("number", [0, 57, 119])
def test_a_file_that_changes_has_its_own_part_sent_again_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, change: str
) -> None:
    """It may be split, or joined with its neighbour."""
    monkeypatch.setattr(packing, "MOST_PART_BYTES", 100_000)
    noise(folder, **{f"{item:03}.bin": 3_000 for item in range(120)})
    before, edited = pack(folder), folder / f"{number:03}.bin"
    if change == "is removed":
        edited.unlink()
    elif change == "is added":
        noise(folder, **{f"{number:03}-new.bin": 3_000})
    else:
        edited.write_bytes(random.Random("edited").randbytes(9_000 if change == "grows" else 1))
    after = pack(folder)
    assert len(before.parts) >= 4
    assert 1 <= len(set(after.parts) - set(before.parts)) <= 2
    assert len(set(after.parts) & set(before.parts)) >= len(before.parts) - 2
    assert digest(unpack(after.parts)) == after.sha256


def test_the_digest_does_not_depend_on_the_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(folder, **{f"{item:03}.bin": 3_000 for item in range(12)})
    expected = pack(folder)
    monkeypatch.setattr(packing, "MOST_PART_BYTES", 10_000)
    assert len(pack(folder).parts) > len(expected.parts)
    assert pack(folder).sha256 == expected.sha256


def test_a_folder_that_fills_all_config_maps_is_sent_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_PART_BYTES", 100_000)
    noise(folder, **{f"{item:03}.bin": 9_500 for item in range(79)})
    packed = pack(folder)
    assert len(packed.parts) == MOST_CODE_PARTS
    assert all(len(part) <= packing.MOST_PART_BYTES for part in packed.parts)
    assert digest(unpack(packed.parts)) == packed.sha256


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"model.bin": 1_100_000},
            "1.1 MB in 1 file, and 1.0 MB a file, compressed is allowed; the largest: model.bin",
        ),
        ({f"{number}.bin": 900_000 for number in range(9)}, "8.1 MB in 13 files, and 8.0 MB, compressed"),
        ({"zeros.bin": -(65 << 20)}, "64 MiB is allowed; the largest: zeros.bin (68.2 MB)"),
    ],
    ids=["a file", "a folder", "before it is compressed"],
)
def test_what_is_too_large_is_named_with_the_way_out(folder: Path, files: dict[str, int], said: str) -> None:
    for name, size in files.items():
        with (folder / name).open("wb") as file:
            if size < 0:
                file.truncate(-size)
            else:
                file.write(random.Random(name).randbytes(size))
    with pytest.raises(BadCode, match="put data and models on the shared volume") as refusal:
        pack(folder)
    assert said in str(refusal.value)


def test_the_wrong_folder_is_noticed_before_all_of_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_FILES", 3)
    with pytest.raises(BadCode, match="has more than 3 files; change to the folder that has the code"):
        pack(folder)


def test_a_name_that_cannot_be_printed_is_left_out(folder: Path) -> None:
    expected = pack(folder).sha256
    (folder / "Icon\r").write_text("")
    packed = pack(folder)
    assert packed.sha256 == expected
    assert packed.left_out == ("'Icon\\r': has a name that cannot be printed",)


def test_a_folder_whose_name_cannot_be_printed_is_left_out(folder: Path) -> None:
    write(folder, **{"two\nlines/x.py": ""})
    packed = pack(folder)
    assert not [path for path in packed.paths if "lines" in path]
    assert packed.left_out == (r"'two\nlines': has a name that cannot be printed",)


@pytest.mark.parametrize("character", ["\xa0", "\u3000", "\u200d", "\xad"])
def test_blanks_and_joiners_of_other_scripts_are_sent_and_read_again(folder: Path, character: str) -> None:
    paths = {f"of{character}models/x.py", f"one{character}model.py"}
    write(folder, **dict.fromkeys(paths, ""))
    packed = pack(folder)
    assert paths <= set(packed.paths)
    assert {file.path for file in unpack(packed.parts)} == set(packed.paths)


def test_a_link_to_itself_is_left_out(folder: Path) -> None:
    before = pack(folder).paths
    (folder / "latest").symlink_to("latest")
    assert pack(folder).paths == before


def test_a_folder_with_nothing_to_send_is_refused(tmp_path: Path) -> None:
    write(tmp_path, **{".ddpjobignore": "*\n", "train.py": ""})
    with pytest.raises(BadCode, match="ignore all of them"):
        pack(tmp_path)
    with pytest.raises(BadCode, match="is not a folder"):
        pack(tmp_path / "train.py")


def archive(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as made:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            made.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, "/etc/passwd"
    return made


@pytest.mark.parametrize(
    "parts",
    [
        [archive(member("../up.py"))],
        [archive(member("/etc/cron.d/x"))],
        [archive(member("link", tarfile.SYMTYPE))],
        [archive(member("device", tarfile.CHRTYPE))],
        [archive(member("twice.py")), archive(member("twice.py"))],
        [archive(member("a.py"))[:40]],
        [b"no archive"],
        [archive(member(""))],
        [archive(member("a/./b"))],
        [archive(member("two\nlines"))],
        [archive(member("not-\udcff-utf-8"))],
        [gzip.compress(member("@LongLink", tarfile.GNUTYPE_LONGNAME).tobuf() * 5000)],
    ],
    ids=[
        "above", "absolute", "a link", "a device", "twice", "cut", "no archive", "no name", "no plain name",
        "two lines", "not UTF-8", "headers of headers",
    ],
)  # fmt: skip
def test_packed_code_of_another_author_is_not_trusted(parts: list[bytes]) -> None:
    with pytest.raises(BadCode, match="the packed code"):
        unpack(parts)


@pytest.mark.parametrize(
    "paths",
    [
        [".git/config"],
        ["lib/.git"],
        ["lib/.GIT/config"],
        [".g\u200cit/config"],
        [".git./config"],
        ["git~1/config"],
        [".hg/hgrc"],
        ["lib/.svn/entries"],
    ],
    ids=[
        "git", "its file", "case", "ignored on HFS", "ignored on NTFS", "short name", "hg", "svn",
    ],
)  # fmt: skip
def test_packed_code_with_a_repository_is_refused_as_git_would_run_its_settings(paths: list[str]) -> None:
    with pytest.raises(BadCode, match="is part of a repository, whose settings can run programs"):
        unpack([archive(member("train.py"), *map(member, paths))])


@pytest.mark.parametrize("name", ["HEAD", "lib/head", "lib/HE\u200cAD"])
@pytest.mark.parametrize("content", [b"ref: refs/heads/main\n", b"ref:refs/x", b"ab" * 20, b"AB" * 32 + b"\n"])
def test_packed_code_with_a_head_is_refused_as_its_folder_may_be_a_bare_repository(name: str, content: bytes) -> None:
    with pytest.raises(BadCode, match="is part of a repository, whose settings can run programs"):
        unpack([archive(member("train.py")), archive(member(name), content=content)])


@pytest.mark.parametrize("path", [packing.FETCHED, f"{packing.FETCHED}/x", "a/" * 600 + "b"])
def test_a_path_that_pack_does_not_write_is_refused(path: str) -> None:
    with pytest.raises(BadCode, match="which is not a file of a folder"):
        unpack([archive(member(path))])


def test_packed_code_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_BYTES", 1 << 20)
    with pytest.raises(BadCode, match="larger than 1 MiB"):
        unpack([archive(member("zeros"), content=bytes(2 << 20))])


def test_headers_that_unpack_without_end_are_refused_before_they_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(packing, "MOST_FILES", 10)
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, 32 << 20
    bomb = gzip.compress(header.tobuf() + bytes(header.size))
    tracemalloc.start()
    try:
        with pytest.raises(BadCode, match="larger than 1 MiB"):
            unpack([bomb])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
