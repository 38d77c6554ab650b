"""`ddpjob code`: the code of a job, back in a folder."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from ddpjob_operator.api.pod import Code
from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import REFUSED
from ddpjob_operator.follow.read import read_job
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.submit import config_maps
from ddpjob_operator.submit.pack import FETCHED, BadCode, File, digest, files_in_words, unpack


def get_code(cluster: Cluster, name: str, folder: Path) -> int:
    """Write the code of a job to a new folder."""

    if os.path.lexists(folder):
        print(f"error: {folder} exists; name a new folder with --to", file=sys.stderr)
        return REFUSED

    async def ask(client: Client, namespace: str) -> int:
        job = await read_job(client, namespace, name)
        given = (job.get("spec") or {}).get("code")
        if not given:
            why = f"{name} was not submitted with code: its program is in the image or on the volume"
            raise ApiError(0, "NoCode", why)
        code = Code.model_validate(given)
        try:
            files = unpack(await config_maps.fetch(client, namespace, code.config_maps))
        except BadCode as error:
            raise ApiError(0, "Damaged", str(error)) from None
        if (found := digest(files)) != code.sha256:
            raise ApiError(0, "Damaged", f"the ConfigMaps of {name} have the code {found}, and its is {code.sha256}")
        _write([*files, _marker(name)], folder)
        print(f"code {code.sha256[:12]}: {files_in_words(len(files))} in {folder}")
        return 0

    return asked(cluster, ask)


def _marker(name: str) -> File:
    """Without it the folder would be part of what is submitted next from the folder around it."""
    said = f"ddpjob code wrote this folder: the code of {name}. A submit from a folder around it leaves it out.\n"
    return File(FETCHED, 0o644, said.encode())


def _write(files: list[File], folder: Path) -> None:
    """All of them, or no folder.

    Raises:
        ApiError: a file or folder cannot be written; the message names it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        for file in files:
            path = beside / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            path.chmod(file.mode)
        beside.chmod(0o755)
        beside.rename(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> ApiError:
    """That of a full disk names no file."""
    place = error.filename or folder
    return ApiError(0, "CannotWrite", f"{place}: {error.strerror}; name a folder that you may write to with --to")
