"""Submitted code on its way to the ranks: unpacked once, verified, copied into the working directory."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.trainer.launch.submitted import Alter, archive, digest_of, submitted

from ddp_trainer.contract.environment import SubmittedCode
from ddp_trainer.contract.exit_codes import EXIT_USER, UserError
from ddp_trainer.launch import code_archive, work_files
from ddp_trainer.launch.code import difference, unpack, volume_failure
from ddp_trainer.launch.code_archive import Entry, digest
from ddp_trainer.launch.leftovers import LEFTOVER_SECONDS, remove_leftovers
from ddp_trainer.launch.work_files import copy_code, plan_files, whose_is
from ddpjob_operator.core.manifests.code import part_name
from ddpjob_operator.submit.pack import pack

FILES = {
    "train.py": "import lib.model\n",
    "lib/__init__.py": "",
    "lib/model.py": "WIDTH = 8\n",
    "config/ü.yaml": "a: 1\n",
}
JOB = "digits"


def run(shared: Path, files: Mapping[str, str], job: str = JOB) -> Path:
    """What the launcher does with these files; the working directory."""
    code = submitted(shared.parent / digest_of(files)[:8], files)
    copy_code(unpack(code, shared / "code"), code, shared, job)
    return shared / "work" / job


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_digest_is_of_the_tree_and_the_same_for_every_packing() -> None:
    listing = {"b": Entry(0o644, "1" * 64), "a/é": Entry(0o755, "2" * 64), "a": Entry(0o644, "3" * 64)}
    # sha256sum of the three lines, sorted
    assert digest(listing) == "1de8a95250a576c696b1352dd1ed37571de1a2d7695e1dbaddb201c5642906ce"


def test_code_is_unpacked_read_only_under_its_digest(tmp_path: Path) -> None:
    code = submitted(tmp_path / "archives", FILES)
    archive(tmp_path / "archives" / "02.tar.gz", {"run.sh": "#!/bin/sh\n"}, mode=0o755)
    code = SubmittedCode(code.archives, digest_of(FILES | {"run.sh": "#!/bin/sh\n"}, frozenset({"run.sh"})))
    unpack(code, tmp_path / "code")
    tree = tmp_path / "code" / code.sha256
    assert texts(tree) == FILES | {"run.sh": "#!/bin/sh\n"}
    assert {path.name: path.stat().st_mode & 0o777 for path in tree.rglob("*.*") if path.is_file()}.items() >= {
        ("run.sh", 0o555), ("train.py", 0o444)
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "code").iterdir()] == [code.sha256]


def test_what_the_command_line_packs_is_what_a_pod_unpacks(tmp_path: Path) -> None:
    noise = {name: os.urandom(600_000).hex() for name in ("a.bin", "z.bin")}  # too large for one part
    for path, text in {**FILES, **noise, "empty": "", "deep/" * 30 + "long.py": "x"}.items():
        (tmp_path / "folder" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / path).write_text(text)
    (tmp_path / "folder/train.py").chmod(0o775)
    packed = pack(tmp_path / "folder")
    assert len(packed.parts) > 1
    (tmp_path / "parts").mkdir()
    for number, part in enumerate(packed.parts):
        (tmp_path / "parts" / part_name(number)).write_bytes(part)
    unpack(SubmittedCode(tmp_path / "parts", packed.sha256), tmp_path / "code")
    tree = tmp_path / "code" / packed.sha256
    assert texts(tree) == texts(tmp_path / "folder")
    assert (tree / "train.py").stat().st_mode & 0o777 == 0o555


def link(member: tarfile.TarInfo) -> None:
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"


def set_(**fields: object) -> Alter:
    return lambda member: [setattr(member, name, value) for name, value in fields.items()] and None


@pytest.mark.parametrize(
    ("files", "alter", "says"),
    [
        ({"/etc/x": ""}, None, "'/etc/x' is an absolute path"),
        ({"a/../../x": ""}, None, "leads out of the folder"),
        ({"./x": ""}, None, "is no plain path"),
        ({"a//x": ""}, None, "is no plain path"),
        ({"x\n644 0 y": ""}, None, "has a control character"),
        ({"x" * 256: ""}, None, "is too long"),
        ({"x": ""}, link, "'x' is no regular file"),
        ({"x": ""}, set_(type=tarfile.LNKTYPE, linkname="y"), "'x' is no regular file"),
        ({"x": ""}, set_(type=tarfile.CHRTYPE), "'x' is no regular file"),
        ({"x": ""}, set_(type=tarfile.FIFOTYPE), "'x' is no regular file"),
        ({"x": ""}, set_(mode=0o4755), "has the mode 4755"),
        ({"x": ""}, set_(pax_headers={"size": "-5"}), "size -5|damaged"),
        ({"x": ""}, set_(pax_headers={"size": str(1 << 40)}), "more than 256 MiB"),
        ({"x": ""}, set_(pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "y"}),
         "damaged|no regular file"),
        ({"x": "", "x/y": ""}, None, "is a file and a folder"),
        ({"x/y": "", "x": ""}, None, "is a file and a folder"),
        ({"x": "changed"}, None, "was expected: submit the code again"),
        ({str(number): "" for number in range(101)}, None, "more than 100 files and folders"),
        ({str(number): "" for number in range(101)}, set_(type=tarfile.DIRTYPE), "more than 100 files and folders"),
    ],
)  # fmt: skip
def test_what_may_not_be_submitted_is_named_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], alter: Alter | None, says: str
) -> None:
    monkeypatch.setattr(code_archive, "MOST_FILES", 100)
    archive(tmp_path / "archives" / "00.tar.gz", files, alter=alter or (lambda _: None))
    with pytest.raises(UserError, match=says):
        unpack(SubmittedCode(tmp_path / "archives", "0" * 64), tmp_path / "code")
    assert [path for path in tmp_path.rglob("*") if "archives" not in path.parts] == [tmp_path / "code"]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:60] + bytes([data[60] ^ 0xFF]) + data[61:]


@pytest.mark.parametrize(
    "damage", [truncated, flipped, lambda _: b"", lambda _: b"no archive", lambda _: gzip.compress(b"no tar" * 999)]
)
def test_a_damaged_archive_is_one_clear_error(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    code = submitted(tmp_path / "archives", {"a.bin": os.urandom(30_000).hex(), "b.py": ""})
    path = tmp_path / "archives" / "00.tar.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"00\.tar\.gz is damaged .*submit the code again|was expected"):
        unpack(code, tmp_path / "code")


def test_headers_that_describe_headers_without_end_are_a_damaged_archive(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    (tmp_path / "00.tar.gz").write_bytes(gzip.compress(header.tobuf() * 5000))
    with pytest.raises(UserError, match="is damaged"):
        unpack(SubmittedCode(tmp_path, "0" * 64), tmp_path / "code")


def test_the_same_path_in_two_archives_is_refused(tmp_path: Path) -> None:
    for name in ("00.tar.gz", "01.tar.gz"):
        archive(tmp_path / name, {"x": name})
    with pytest.raises(UserError, match="'x' is there twice"):
        unpack(SubmittedCode(tmp_path, "0" * 64), tmp_path / "code")


def test_few_bytes_that_unpack_to_very_many_are_not_read_to_their_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(code_archive, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(code_archive, "MOST_FILES", 16)
    header = tarfile.TarInfo("comment")
    header.type, header.size = tarfile.XHDTYPE, 1 << 30
    (tmp_path / "00.tar.gz").write_bytes(gzip.compress(header.tobuf() + bytes(1 << 23)))
    with pytest.raises(UserError, match="more than 1 MiB"):
        unpack(SubmittedCode(tmp_path, "0" * 64), tmp_path / "code")


def test_without_archives_the_error_says_where_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has 0 archives"):
        unpack(SubmittedCode(tmp_path, "0" * 64), tmp_path / "code")


def change(path: Path) -> None:
    path.chmod(0o644)
    path.write_text("evil = 1\n")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(lambda tree: change(tree / "train.py"), "train.py is different", id="changed"),
        pytest.param(lambda tree: (tree / "lib/model.py").unlink(), "lib/model.py is missing", id="missing"),
        pytest.param(
            lambda tree: ((tree / "train.py").unlink(), (tree / "train.py").symlink_to(__file__)), "no file", id="link"
        ),
    ],
)
def test_a_copy_that_was_changed_is_mended(tmp_path: Path, capsys, damage: Callable[[Path], object], says: str) -> None:
    code = submitted(tmp_path / "archives", FILES)
    unpack(code, tmp_path / "code")
    tree = tmp_path / "code" / code.sha256
    damage(tree)
    unpack(code, tmp_path / "code")
    assert texts(tree) == FILES
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["none", "file", "folder for a file", "file for a folder", "link for a folder"])
def test_what_was_added_to_a_copy_stays_also_where_that_is_mended(tmp_path: Path, damage: str) -> None:
    code = submitted(tmp_path / "archives", FILES)
    listing = unpack(code, tmp_path / "code")
    tree = tmp_path / "code" / code.sha256
    (tree / "runs/exp").mkdir(parents=True)
    (tree / "runs/exp/last.pt").write_text("three days")
    if damage == "file":
        change(tree / "train.py")
    if damage == "folder for a file":
        (tree / "train.py").unlink()
        (tree / "train.py").mkdir()
        (tree / "train.py/last.pt").write_text("four days")
    if damage in ("file for a folder", "link for a folder"):
        (tree / "lib").rename(tree / "before")
        (tmp_path / "outside").mkdir()
        (tree / "lib").touch() if damage.startswith("file") else (tree / "lib").symlink_to(tmp_path / "outside")
    inode = tree.stat().st_ino
    assert unpack(code, tmp_path / "code") == listing
    assert difference(tree, listing) is None
    assert tree.stat().st_ino == inode
    kept = {text for text in texts(tree).values() if "days" in text}
    assert kept == {"three days"} | ({"four days"} if damage == "folder for a file" else set())
    assert not (tmp_path / "outside").exists() or not list((tmp_path / "outside").iterdir())


def test_pods_that_unpack_at_the_same_time_leave_one_whole_copy(tmp_path: Path) -> None:
    files = FILES | {f"data/{number}.txt": str(number) * 999 for number in range(200)}
    code = submitted(tmp_path / "archives", files)
    start = threading.Barrier(4)
    problems: list[str | BaseException | None] = []

    def pod() -> None:
        start.wait()
        try:
            listing = unpack(code, tmp_path / "code")
            problems.append(difference(tmp_path / "code" / code.sha256, listing))
            copy_code(listing, code, tmp_path, JOB)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=pod) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [None] * 4
    assert texts(tmp_path / "work" / JOB) == files
    assert [path.name for path in (tmp_path / "code").iterdir()] == [code.sha256]


def test_what_a_killed_process_left_half_made_is_removed_a_day_later(tmp_path: Path) -> None:
    (tmp_path / "code/.old").mkdir(parents=True)
    (tmp_path / "code/.new").mkdir()
    old = time.time() - LEFTOVER_SECONDS - 60
    os.utime(tmp_path / "code/.old", (old, old))
    code = submitted(tmp_path / "archives", FILES)
    unpack(code, tmp_path / "code")
    assert {path.name for path in (tmp_path / "code").iterdir()} == {".new", code.sha256}


def test_the_working_directory_has_the_files_of_the_code(shared: Path) -> None:
    work = run(shared, FILES)
    assert texts(work) == FILES
    assert (work / "lib/model.py").resolve() == work / "lib/model.py"
    assert (work / "lib/model.py").stat().st_nlink == 1


def test_the_files_have_the_modes_that_they_were_submitted_with_and_so_have_copies_of_them(shared: Path) -> None:
    """As scripts do that keep their source beside their logs, in each attempt."""
    folder = shared.parent / "archives"
    archive(folder / "00.tar.gz", FILES)
    archive(folder / "01.tar.gz", {"run.sh": "#!/bin/sh\n"}, mode=0o755)
    code = SubmittedCode(folder, digest_of(FILES | {"run.sh": "#!/bin/sh\n"}, frozenset({"run.sh"})))
    copy_code(unpack(code, shared / "code"), code, shared, JOB)
    shutil.copytree(shared / "work" / JOB, shared / "log")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (shared / "log").rglob("*") if path.is_file()}
    assert modes == {"train.py": 0o644, "__init__.py": 0o644, "model.py": 0o644, "ü.yaml": 0o644, "run.sh": 0o755}
    tree = shared / "code" / code.sha256
    assert not [path for path in tree.rglob("*") if path.is_file() and path.stat().st_mode & 0o222]


def test_what_a_script_writes_beside_its_resolved_file_stays_and_is_of_its_job(shared: Path) -> None:
    """As train.py of YOLOv5 does."""
    work = run(shared, FILES)
    root = (work / "train.py").resolve().parent
    (root / "runs").mkdir()
    (root / "runs/last.pt").write_text("three days")
    other = run(shared, FILES, "other")
    assert texts(other) == FILES
    run(shared, FILES)
    run(shared, FILES | {"train.py": "# edited"})
    assert (work / "train.py").resolve().parent == root
    assert texts(root) == FILES | {"train.py": "# edited", "runs/last.pt": "three days"}


def test_the_files_follow_the_code_and_those_of_the_job_stay(shared: Path) -> None:
    work = run(shared, FILES | {"old/gone.py": "", "old/kept/gone.py": "", "bare/gone.py": "", "was_file": ""})
    (work / "old/kept/result.txt").write_text("of the job")
    (work / "bare/__pycache__").mkdir()
    (work / "lib/latest").symlink_to("checkpoint-5")
    changed = FILES | {"train.py": "import lib\n", "was_file/now_folder.py": ""}
    run(shared, changed)
    assert texts(work) == changed | {"old/kept/result.txt": "of the job"}
    assert not (work / "bare").exists()
    assert (work / "lib/latest").readlink() == Path("checkpoint-5")
    run(shared, FILES)
    assert texts(work) == FILES | {"old/kept/result.txt": "of the job"}


def test_files_of_a_pod_that_was_killed_meanwhile_are_found_again(shared: Path, monkeypatch) -> None:
    def full(new: Path, path: Path) -> None:
        if path.name == "train.py":
            raise OSError(28, "No space left on device")
        path.hardlink_to(new)

    with monkeypatch.context() as during:
        during.setattr("ddp_trainer.launch.work_files._put", full)
        with pytest.raises(OSError, match="No space"):
            run(shared, {"a.py": "", "train.py": ""})
    work = run(shared, {"train.py": "1"})
    assert texts(work) == {"train.py": "1"}


def test_what_the_job_wrote_in_the_place_of_new_code_is_named_and_stays(shared: Path) -> None:
    work = run(shared, FILES)
    (work / "results.json").write_text("of the job")
    for _ in range(2):  # a pod that begins again finds no more to its liking
        with pytest.raises(UserError, match=r"results\.json; move or delete them there"):
            run(shared, FILES | {"results.json": "of the code"})
    assert texts(work) == FILES | {"results.json": "of the job"}


def test_what_the_job_has_replaced_itself_stays_after_a_restart(shared: Path, capsys) -> None:
    work = run(shared, FILES)
    (work / "new").write_text("of the job")
    (work / "new").replace(work / "config/ü.yaml")
    run(shared, FILES)
    assert (work / "config/ü.yaml").read_text() == "of the job"
    assert "config/ü.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("edited", [{}, {"train.py": "# edited"}], ids=["same", "edited"])
def test_a_copy_with_its_time_of_a_file_of_the_code_is_of_the_job(shared: Path, edited: Mapping[str, str]) -> None:
    files = FILES | {"config.yaml": "width: 8\n", "configs/large.yaml": "width: 512\n"}
    work = run(shared, files)
    shutil.copy2(work / "configs/large.yaml", work / "config.yaml")
    run(shared, files | edited)
    assert texts(work) == files | edited | {"config.yaml": "width: 512\n"}


def test_data_of_the_code_that_the_job_has_changed_stays_until_its_author_changes_it(shared: Path, capsys) -> None:
    work = run(shared, FILES | {"train.log": "epoch 1\n"})
    change(work / "train.log")
    edited = FILES | {"train.py": "# edited", "train.log": "epoch 1\n"}
    run(shared, edited)
    assert texts(work) == edited | {"train.log": "evil = 1\n"}
    assert "kept what the job has written in the place of its code: train.log" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"train\.log; move or delete them there"):
        run(shared, edited | {"train.log": "another one\n"})
    assert texts(work) == edited | {"train.log": "evil = 1\n"}


def test_a_module_that_was_changed_is_replaced_and_kept_under_another_name(shared: Path, capsys) -> None:
    work = run(shared, FILES)
    change(work / "lib/model.py")
    with (work / "lib/model.py").open("a") as file:
        run(shared, FILES)
        file.write("worse = 2\n")
    (aside,) = texts(work).keys() - FILES.keys()
    assert texts(work) == FILES | {aside: "evil = 1\nworse = 2\n"}
    assert aside.startswith("lib/model.py.changed-")
    assert f"replaced, and kept as {aside.removeprefix('lib/')}" in capsys.readouterr().err


def test_a_file_that_has_lost_its_content_is_written_again(shared: Path) -> None:
    work = run(shared, FILES)
    time_before = (work / "config/ü.yaml").stat().st_mtime
    (work / "config/ü.yaml").write_text("")
    os.utime(work / "config/ü.yaml", (time_before, time_before))
    run(shared, FILES)
    assert texts(work) == FILES


@pytest.mark.parametrize("slow", ["_look", "read_archives"])
def test_a_line_that_a_script_wrote_while_a_slow_pod_begins_stays(shared: Path, monkeypatch, slow: str) -> None:
    """The gang of the faster pods has begun; a spare still has the record of the code before."""
    work, edited = run(shared, FILES | {"results.csv": "old\n"}), {**FILES, "results.csv": "header\n"}
    original = getattr(work_files, slow)

    def with_another_pod(*arguments: object) -> object:
        monkeypatch.setattr(work_files, slow, original)
        run(shared, edited)
        with (work / "results.csv").open("a") as file:
            file.write("epoch 1\n")
        return original(*arguments)

    monkeypatch.setattr(work_files, slow, with_another_pod)
    run(shared, edited)
    assert texts(work) == edited | {"results.csv": "header\nepoch 1\n"}


def test_a_file_that_is_written_to_while_it_is_read_stays(shared: Path, monkeypatch) -> None:
    work, read = run(shared, FILES | {"results.csv": "header\n"}), work_files.read_hashed
    for is_before in (True, False):

        def with_a_script(content, into=None, is_before=is_before):
            sha256 = None if is_before else read(content, into)
            if content.name == str(work / "results.csv"):
                with (work / "results.csv").open("a") as file:
                    file.write("epoch\n")
            return sha256 or read(content, into)

        with monkeypatch.context() as during:
            during.setattr(work_files, "read_hashed", with_a_script)
            run(shared, FILES | {"results.csv": "header\n"})
    assert (work / "results.csv").read_text() == "header\nepoch\nepoch\n"


def test_what_was_edited_is_as_the_script_left_it_while_it_was_read(shared: Path, monkeypatch) -> None:
    work, read = run(shared, FILES | {"results.csv": "old\n"}), work_files.read_hashed

    def with_a_script(content, into=None):
        sha256 = read(content, into)
        if getattr(content, "name", None) == str(work / "results.csv"):
            with (work / "results.csv").open("a") as file:
                file.write("epoch\n")
        return sha256

    monkeypatch.setattr(work_files, "read_hashed", with_a_script)
    with pytest.raises(UserError, match=r"results\.csv; move or delete them there"):
        run(shared, FILES | {"results.csv": "header\n"})
    assert (work / "results.csv").read_text() == "old\nepoch\n"


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff"])
@pytest.mark.parametrize("edited", [{}, {"train.py": "# edited", "config/ü.yaml": "a: 2\n"}], ids=["same", "edited"])
def test_a_record_that_was_lost_does_not_make_the_code_the_files_of_the_job(
    shared: Path, content: bytes | None, edited: Mapping[str, str]
) -> None:
    """And a module that has lost its content with it."""
    work, record = run(shared, FILES), shared / "work" / f".{JOB}" / "code.json"
    record.unlink() if content is None else record.write_bytes(content)
    time_before = (work / "lib/model.py").stat().st_mtime
    (work / "lib/model.py").write_text("")
    os.utime(work / "lib/model.py", (time_before, time_before))
    run(shared, FILES | edited)
    assert texts(work) == FILES | edited
    run(shared, FILES)
    assert texts(work) == FILES


def linked(shared: Path, files: Mapping[str, str]) -> Path:
    """The working directory as launchers left it that made links."""
    code = submitted(shared.parent / digest_of(files)[:8], files)
    unpack(code, shared / "code")
    work, record = shared / "work" / JOB, shared / "work" / f".{JOB}" / "code.json"
    for path in files:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).symlink_to(shared / "code" / code.sha256 / path)
    record.parent.mkdir()
    record.write_text(json.dumps({"sha256": code.sha256, "paths": sorted(files)}))
    return work


def test_a_job_that_had_links_to_its_code_goes_on_with_copies(shared: Path, capsys) -> None:
    work = linked(shared, FILES)
    for _ in range(2):
        run(shared, FILES)
        assert texts(work) == FILES
        assert not [path for path in work.rglob("*") if path.is_symlink()]
    change(work / "lib/model.py")
    change(work / "config/ü.yaml")
    run(shared, FILES)
    assert (work / "lib/model.py").read_text() == FILES["lib/model.py"]
    assert "kept as model.py.changed-" in capsys.readouterr().err
    (aside,) = (work / "lib").glob("*.changed-*")
    aside.unlink()
    edited = {"train.py": "# edited", "config/ü.yaml": FILES["config/ü.yaml"]}
    run(shared, edited)
    assert texts(work) == edited | {"config/ü.yaml": "evil = 1\n"}


def test_links_to_code_that_was_edited_meanwhile_go(shared: Path) -> None:
    work = linked(shared, FILES)
    edited = {"train.py": "# edited", "lib": "no folder any more"}
    run(shared, edited)
    assert texts(work) == edited
    assert not (work / "config").exists()
    assert json.loads((shared / "work" / f".{JOB}" / "code.json").read_text())["files"].keys() == edited.keys()


def test_a_job_that_had_links_keeps_what_it_had_written_in_their_place(shared: Path) -> None:
    work = linked(shared, FILES)
    (work / "config/ü.yaml").unlink()
    (work / "config/ü.yaml").write_text("of the job")
    for files in (FILES, FILES | {"train.py": "# edited"}):
        run(shared, files)
        assert texts(work) == files | {"config/ü.yaml": "of the job"}


def test_a_record_that_cannot_be_read_just_now_is_no_error_of_the_user(shared: Path, monkeypatch) -> None:
    run(shared, FILES)
    read = Path.read_bytes

    def stale(path: Path) -> bytes:
        if path.name == "code.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.raises(OSError, match="Stale"):
        run(shared, FILES | {"train.py": "# edited"})


def test_the_record_is_on_the_disk_before_it_has_its_name(shared: Path, monkeypatch) -> None:
    work_folder, synced = shared / "work" / f".{JOB}", list[int]()
    sync_ = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), sync_(descriptor)))
    run(shared, FILES)
    assert (work_folder / "code.json").stat().st_ino in synced


def test_a_volume_without_hard_links_has_the_files_too(shared: Path, monkeypatch) -> None:
    def refuse(path: Path, other: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    work = run(shared, FILES)
    assert texts(work) == FILES
    change(work / "train.py")
    run(shared, FILES)
    assert sorted(texts(work).values()) == sorted([*FILES.values(), "evil = 1\n"])


def test_a_volume_that_gives_all_files_to_another_user_has_the_files_too(shared: Path, monkeypatch) -> None:
    """As cifs with uid=0 does, the default for a share of Azure Files: that user alone may set modes and times."""
    utime = os.utime

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def touch(path: Path, times: object = None, **more: object) -> None:
        if times is not None or more:
            refuse()
        utime(path)

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "utime", touch)
    work = run(shared, FILES)
    assert texts(work) == FILES
    (work / "log.txt").write_text("three days")
    (shared / "code" / digest_of(FILES) / "train.py").unlink()
    run(shared, FILES)
    assert texts(shared / "code" / digest_of(FILES)) == FILES
    run(shared, FILES | {"train.py": "# edited"})
    assert texts(work) == FILES | {"train.py": "# edited", "log.txt": "three days"}


def test_what_a_pod_is_putting_there_is_no_leftover_for_another_one(shared: Path, monkeypatch) -> None:
    put = work_files._put

    def with_another_pod(new: Path, path: Path) -> None:
        remove_leftovers(shared / "work" / f".{JOB}", time.time())
        put(new, path)

    monkeypatch.setattr(work_files, "_put", with_another_pod)
    assert texts(run(shared, FILES)) == FILES


def test_files_behind_a_link_that_the_job_has_made_are_left(shared: Path) -> None:
    work = run(shared, FILES)
    (work / "lib").rename(shared / "elsewhere")
    (work / "lib").symlink_to(shared / "elsewhere")
    run(shared, {"train.py": ""})
    assert texts(shared / "elsewhere") == {"__init__.py": "", "model.py": "WIDTH = 8\n"}


def test_folders_behind_a_link_that_the_job_has_made_are_left(shared: Path) -> None:
    work = run(shared, FILES | {"lib/empty/gone.py": ""})
    shutil.rmtree(work / "lib")
    for folder in ("empty", "__pycache__"):
        (shared / "elsewhere" / folder).mkdir(parents=True)
    (work / "lib").symlink_to(shared / "elsewhere")
    run(shared, {"train.py": ""})
    assert {path.name for path in (shared / "elsewhere").iterdir()} == {"empty", "__pycache__"}
    (shared / "elsewhere/empty").rmdir()
    work = run(shared, FILES, "other")
    shutil.rmtree(work / "lib")
    (work / "lib").symlink_to(shared / "elsewhere")
    run(shared, {"train.py": ""}, "other")
    assert {path.name for path in (shared / "elsewhere").iterdir()} == {"__pycache__"}


@pytest.mark.parametrize("place", ["train.py", "lib"])
@pytest.mark.parametrize("instead", ["link", "dangling link", "other", "pipe"])
@pytest.mark.parametrize("edited", [{}, {"lib/new.py": ""}], ids=["same", "edited"])
def test_what_the_job_has_put_in_the_place_of_modules_is_not_imported(
    shared: Path, place: str, instead: str, edited: Mapping[str, str], capsys
) -> None:
    """`other` is a folder for a file, and a file for a folder."""
    work, elsewhere = run(shared, FILES), shared / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.py").write_text("evil = 1\n")
    (work / place).rename(shared / "before")
    if instead == "pipe":
        os.mkfifo(work / place)
    elif instead == "dangling link":
        (work / place).symlink_to(shared / "nowhere")
    elif instead == "link":
        (work / place).symlink_to(elsewhere if place == "lib" else elsewhere / "model.py")
    elif place == "lib":
        (work / place).write_text("of the job")
    else:
        (work / place).mkdir()
        (work / place / "last.pt").write_text("of the job")
    run(shared, FILES | edited)
    run(shared, FILES | edited)
    kept = texts(work)
    assert {path: kept.pop(path) for path in FILES | edited} == FILES | edited
    assert not any((work / path).is_symlink() for path in ("train.py", "lib", "lib/model.py"))
    assert len(list(work.glob("*.changed-*"))) == 1
    assert list(kept.values()) == {"link": ["evil = 1\n"] if place != "lib" else [], "other": ["of the job"]}.get(
        instead, []
    )
    assert f"{place} is not what was submitted: it is replaced, and kept as {place}.changed-" in capsys.readouterr().err
    assert texts(elsewhere) == {"model.py": "evil = 1\n"}


def test_a_link_in_the_place_of_a_folder_of_data_stays(shared: Path) -> None:
    work = run(shared, FILES)
    shutil.rmtree(work / "config")
    (shared / "elsewhere").mkdir()
    (work / "config").symlink_to(shared / "elsewhere")
    run(shared, FILES)
    assert (work / "config").is_symlink()
    assert not list((shared / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("found", "make", "set_aside", "remove", "taken"),
    [
        pytest.param({}, ["d/x", "y"], [], [], [], id="nothing yet"),
        pytest.param({"d/x": "code", "y": "code"}, [], [], [], [], id="all there"),
        pytest.param({"d/x": "earlier", "y": "code"}, ["d/x"], [], [], [], id="of other code"),
        pytest.param({"y": "changed"}, ["d/x", "y"], ["y"], [], [], id="changed, and runs"),
        pytest.param({"y": "job"}, ["d/x"], [], [], ["y"], id="a file of the job"),
        pytest.param({"d": "job"}, ["y"], [], [], ["d"], id="a file where a folder should be"),
        pytest.param({"d": "earlier"}, ["d/x", "y"], [], ["d"], [], id="other code had a file there"),
        pytest.param({"d": "changed"}, ["d/x", "y"], ["d"], [], [], id="a link where a folder of modules should be"),
    ],
)
def test_what_is_done_about_what_is_there(found, make, set_aside, remove, taken) -> None:
    plan = plan_files({"d/x", "y"}, found)
    assert [list(part) for part in plan] == [make, set_aside, remove, taken]


OLD, NEW = (hashlib.sha256(text.encode()).hexdigest() for text in ("old", "new"))


@pytest.mark.parametrize(
    ("path", "text", "known", "whose"),
    [
        pytest.param("m.py", None, [OLD], None, id="nothing"),
        pytest.param("m.py", "new", [], "code", id="as submitted"),
        pytest.param("m.py", "old", [OLD], "earlier", id="of earlier code"),
        pytest.param("m.py", "mine", [OLD], "changed", id="a module that was changed"),
        pytest.param("m.py", "mine", [], "job", id="a module that the job has written"),
        pytest.param("run", "mine", [OLD], "changed", id="a program that was changed"),
        pytest.param("a/requirements-gpu.txt", "mine", [OLD], "changed", id="requirements"),
        pytest.param("app.pyz", "mine", [OLD], "changed", id="an application"),
        pytest.param("a/libcuda_ops.so.2.1", "mine", [OLD], "changed", id="a library with a version"),
        pytest.param("a/greeting-1.0.tar.gz", "mine", [OLD], "changed", id="a source distribution"),
        pytest.param("a/greeting.zip", "mine", [OLD], "changed", id="another archive"),
        pytest.param("a/log.txt", "mine", [OLD], "job", id="data that was changed"),
        pytest.param("a/log.txt", "", [OLD], "job", id="data that is being written anew"),
        pytest.param("m.py", f"-> /other/shared/code/{'a' * 64}/m.py", [], "earlier", id="a link to code"),
        pytest.param("m.py", f"-> /mnt/shared/code/{'a' * 64}/n.py", [], "job", id="a link to another file of code"),
        pytest.param("m.py", "-> /mnt/shared/m.py", [], "job", id="a link of the job"),
        pytest.param("m.py", "-> /mnt/shared/m.py", [OLD], "changed", id="a link in the place of a module"),
        pytest.param("a/log.txt", "-> /mnt/shared/m.py", [OLD], "job", id="a link in the place of data"),
    ],
)
def test_of_whom_a_file_is(tmp_path: Path, path: str, text: str | None, known: list[str], whose: str | None) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    if text is not None and text.startswith("-> "):
        file.symlink_to(text.removeprefix("-> "))
    elif text is not None:
        file.write_text(text)
    entry = Entry(0o755 if path == "run" else 0o644, NEW)
    assert whose_is(file, path, entry, known) == whose


def test_a_file_that_becomes_executable_without_another_content_is(shared: Path) -> None:
    for mode in (0o644, 0o755):
        folder = shared.parent / f"archives-{mode:o}"
        archive(folder / "00.tar.gz", {"run": "#!/bin/sh\n"}, mode=mode)
        executable = frozenset({"run"}) if mode & 0o111 else frozenset[str]()
        code = SubmittedCode(folder, digest_of({"run": "#!/bin/sh\n"}, executable))
        copy_code(unpack(code, shared / "code"), code, shared, JOB)
        assert (shared / "work" / JOB / "run").stat().st_mode & 0o111 == mode & 0o111


@pytest.mark.processes
def test_bytecode_of_earlier_code_is_not_taken_for_a_file_of_equal_size(shared: Path) -> None:
    """Both versions have four bytes, and were unpacked in the same second."""
    for version in ("1", "2"):
        work = run(shared, {"m.py": f"v={version}\n"})
        printed = subprocess.run(
            [sys.executable, "-c", "import m; print(m.v, m.__cached__)"],
            cwd=work, env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        assert printed[0] == version
        assert Path(printed[1]).exists()


USES_ITS_FOLDER = """
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import lib.model


class Here(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return torch.tensor([lib.model.WIDTH + json.loads(Path("config.json").read_text())["bias"]])


if __name__ == "__main__":
    (batch,) = DataLoader(Here(), num_workers=1, multiprocessing_context="spawn")
    Path("result.txt").write_text(f"{batch.item()} {__file__} {lib.model.__file__} {Path.cwd()}")
"""


def variables(code: SubmittedCode) -> dict[str, str]:
    return {"DDPJOB_CODE_DIR": str(code.archives), "DDPJOB_CODE_SHA256": code.sha256}


def test_a_script_of_submitted_code_runs_in_its_folder_as_do_the_processes_that_it_spawns(tmp_path, start_pod) -> None:
    files = {"src/train.py": USES_ITS_FOLDER, "src/lib/model.py": "WIDTH = 8\n", "config.json": '{"bias": 1}'}
    code = submitted(tmp_path / "archives", files)
    pod = start_pod("", argv=["--script", "src/train.py"], DDPJOB_SCRATCH="/tmp", **variables(code))
    assert pod.wait() == 0, pod.log
    work = pod.shared / "work" / JOB
    assert (work / "result.txt").read_text() == f"9 {work}/src/train.py {work}/src/lib/model.py {work}"
    assert f"code {code.sha256[:12]}: unpacked 3 files" in pod.log


def test_code_that_is_not_what_was_submitted_fails_the_pod_before_torchrun_starts(tmp_path, start_pod) -> None:
    code = submitted(tmp_path / "archives", FILES)
    pod = start_pod("", argv=["--script", "train.py"], **variables(code) | {"DDPJOB_CODE_SHA256": "0" * 64})
    assert pod.wait() == EXIT_USER
    assert pod.message["reason"] == "UserError"
    assert f"{code.sha256}, and {'0' * 64} was expected: submit the code again" in pod.message["message"]


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "DiskFull"), (errno.EDQUOT, "DiskFull"), (errno.EROFS, "WorkerException")]
)
def test_a_volume_that_cannot_be_written_to_has_the_reason_that_the_operator_knows(number: int, reason: str) -> None:
    error = OSError(number, os.strerror(number), "/mnt/shared/code")
    assert volume_failure("the code", error) == (reason, f"the code: {error}")
