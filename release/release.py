"""What a release consists of, apart from images: its version, its notes and the packaged chart.

python release/release.py check v0.1.0    every file that names the version names this one
python release/release.py notes           dist/NOTES.md, from this version's section of CHANGELOG.md
python release/release.py chart REGISTRY  dist/ddpjob-operator-VERSION.tgz, its images from REGISTRY (localhost)
python release/release.py krew            dist/kubectl-ddpjob-VERSION.tar.gz, with the wheel there, and dist/ddpjob.yaml
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "ddpjob-operator"
KREW = ROOT / "manifests" / "krew"
DIST = ROOT / "dist"
NOTES_CHARACTERS = 124_000
"""GitHub refuses more than 125,000 characters ("body is too long")."""
IMAGES_NAMED = (
    "manifests/base/deployment.yaml",
    "manifests/samples/gpus.yaml",
    "operator/ddpjob_operator/settings.py",
    "operator/ddpjob_operator/core/values/job.py",
)
"""Files that name an image of this version."""
_IMAGE = re.compile(r"(ddpjob-[a-z]+):([0-9A-Za-z.-]+?)(?:-cpu|-cuda)?(?![0-9A-Za-z.-])")


def version(root: Path = ROOT) -> str:
    """The version that pyproject.toml names; every other file follows it."""
    found: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return found


def disagreements(tag: str, root: Path = ROOT) -> Iterator[str]:
    """Each place that names another version than the tag, in words."""
    wanted = tag.removeprefix("v")
    if tag != f"v{wanted}":
        yield f"the tag is {tag}, but must be v and a version"
    chart = yaml.safe_load((root / "charts/ddpjob-operator/Chart.yaml").read_text())
    named = {
        "pyproject.toml": version(root),
        "Chart.yaml: version": chart["version"],
        "Chart.yaml: appVersion": chart["appVersion"],
    }
    for place in IMAGES_NAMED:
        for image, found in _IMAGE.findall((root / place).read_text()):
            named[f"{place}: {image}"] = found
    for place, found in named.items():
        if found != wanted:
            yield f"{place} says {found}, the tag {wanted}"
    if not section(wanted, root):
        yield f"CHANGELOG.md has no section [{wanted}] with a date"


def section(wanted: str, root: Path = ROOT) -> str:
    """The changelog's section of a version, without its heading; empty where there is none."""
    text = (root / "CHANGELOG.md").read_text()
    found = re.search(
        rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    return found[1].strip() if found else ""


def notes(wanted: str, root: Path = ROOT) -> str:
    """What the page of a release says: the section of its version, up to the last whole entry that GitHub takes."""
    whole = section(wanted, root)
    if len(whole) <= NOTES_CHARACTERS:
        return whole
    rest = f"\n\nThe rest is in CHANGELOG.md of the tag v{wanted}."
    kept = whole[: NOTES_CHARACTERS - len(rest)]
    return kept[: kept.rindex("\n- ")].rstrip() + rest


def package_chart(into: Path, registry: str = "") -> Path:
    """The chart as `helm push` takes it. The one of the repository has the registry of images that were built here."""
    import helm_python as helm

    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder) / CHART.name
        shutil.copytree(CHART, chart)
        if registry:
            _replace(chart / "values.yaml", "\n  registry: localhost\n", f"\n  registry: {registry}\n")
            _replace(
                chart / "README.md", '| `image.registry` | `"localhost"` |', f'| `image.registry` | `"{registry}"` |'
            )
        return Path(helm.package(chart, destination=into))


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name}: {old!r}"
    file.write_text(text.replace(old, new))


def package_plugin(into: Path) -> Path:
    """The archive that krew downloads: a launcher and the wheel in `into`; beside it the manifest with its checksum.

    The same files give the same bytes, on any machine and at any time.
    """
    name = version()
    wheel = into / f"ddpjob-{Version(name)}-py3-none-any.whl"  # its name has 0.2.0-rc.1 as 0.2.0rc1
    archive = into / f"kubectl-ddpjob-{name}.tar.gz"
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in (KREW / "kubectl-ddpjob", ROOT / "LICENSE", wheel):
            member = tarfile.TarInfo(path.name)
            member.size, member.mode = path.stat().st_size, 0o755 if path.parent == KREW else 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    comment, _, manifest = (KREW / "ddpjob.yaml").read_text().partition("\n")
    assert comment.startswith("#")
    (into / "ddpjob.yaml").write_text(manifest.replace("VERSION", name).replace("SHA256", digest))
    return archive


def main(arguments: list[str]) -> int:
    """Run one of the commands."""
    match arguments:
        case ["check", tag]:
            wrong = list(disagreements(tag))
            print("\n".join(wrong) or f"all files name {tag}", file=sys.stderr if wrong else sys.stdout)
            return 1 if wrong else 0
        case ["notes"]:
            DIST.mkdir(exist_ok=True)
            (DIST / "NOTES.md").write_text(notes(version()) + "\n")
        case ["chart", *registry] if len(registry) <= 1:
            DIST.mkdir(exist_ok=True)
            print(package_chart(DIST, *registry))
        case ["krew"]:
            print(package_plugin(DIST))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
