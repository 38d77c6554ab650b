"""Validation rules for `initializers`."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath

from ddpjob_operator.api.pod import Initializer
from ddpjob_operator.api.spec import DDPJobSpec

LONGEST_DOCUMENT_BYTES = 128_000
"""Of an initializer, which its process gets as one variable: Linux starts none with one of 128 KiB (execve(2)), its
name included."""
_CLAIM_IN_SOURCE = re.compile(r"(?!pvc://)|pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/|$)")
"""What a source may begin with: a claim has the name of an object."""


def as_document(item: Initializer) -> str:
    """What the process of an initializer is given (docs/contracts.md section 9)."""
    return json.dumps(item.model_dump(by_alias=True, exclude_none=True, exclude={"env"}), ensure_ascii=False)


def long_script(spec: DDPJobSpec) -> str | None:
    for index, item in enumerate(spec.initializers):
        size = len(as_document(item).encode("utf-8", "surrogatepass"))
        if item.script is not None and size > LONGEST_DOCUMENT_BYTES:
            return (
                f"spec.initializers[{index}].script: takes {size} bytes as JSON, and {LONGEST_DOCUMENT_BYTES} is the "
                "most that its process can be given; put the script on the volume or in the image, and call it here"
            )
    return None


def one_source(spec: DDPJobSpec) -> str | None:
    for index, item in enumerate(spec.initializers):
        if (item.source is None) == (item.script is None):
            both = "both source and script are" if item.source else "neither source nor script is"
            return f"spec.initializers[{index}]: {both} set; set one of them"
    return None


def repeated_initializer(spec: DDPJobSpec) -> str | None:
    seen: set[str] = set()
    for index, item in enumerate(spec.initializers):
        if item.name in seen:
            return f"spec.initializers[{index}].name: {item.name!r} is not unique; give each initializer its own name"
        seen.add(item.name)
    return None


def source_without_claim(spec: DDPJobSpec) -> str | None:
    for index, item in enumerate(spec.initializers):
        if item.source is not None and not _CLAIM_IN_SOURCE.match(item.source):
            return (
                f"spec.initializers[{index}].source: {item.source!r} names no PersistentVolumeClaim; "
                "write pvc://claim/path"
            )
    return None


def replaced_result(spec: DDPJobSpec) -> str | None:
    """Scripts may add to what is at a path; a source takes the place of it, with all that is below."""
    seen: dict[PurePosixPath, str] = {}
    for index, item in enumerate(spec.initializers):
        path = PurePosixPath(item.path)
        there = next((other for other in seen if other.is_relative_to(path)), None)
        if item.source is not None and there is not None:
            what = f"is that of {seen[there]!r} too" if there == path else f"holds that of {seen[there]!r}"
            return (
                f"spec.initializers[{index}].path: {item.path!r} {what}, whose result this source would replace; use "
                "another path"
            )
        seen.setdefault(path, item.name)
    return None


def outside_the_volume(spec: DDPJobSpec) -> str | None:
    for index, item in enumerate(spec.initializers):
        if ".." in item.path.split("/"):
            return f"spec.initializers[{index}].path: {item.path!r} must be below /mnt/shared; remove `..`"
    return None
