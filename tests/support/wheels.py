"""A wheel made here, for requirements that need no package index."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def wheel(folder: Path, name: str = "greeting", requires: str = "torch") -> str:
    """A wheel of one module; its SHA-256."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": f"TEXT = 'hello from {name}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    lines = [
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}"
        for file, text in files.items()
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (files | {record: "\n".join([*lines, f"{record},,", ""])}).items():
            archive.writestr(file, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()
