"""What `send` does with an API server that has an older CRD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpjob import DDPJob
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.submit.send import send


class Older:
    """An API server whose CRD has no `code`: it drops the field, as all do with what they do not know."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    async def get(self, path: str, resource: str) -> Any:
        if path not in self.objects:
            raise ApiError(404, "NotFound", f"{path} not found", {"name": path.rpartition("/")[2]})
        return self.objects[path]

    get_metadata = get

    async def create(self, path: str, resource: str, body: Any) -> Any:
        spec = {name: value for name, value in (body.get("spec") or {}).items() if name != "code"}
        made = {**body, "metadata": {**body["metadata"], "uid": "1"}, "spec": spec}
        self.objects[f"{path}/{body['metadata']['name']}"] = made
        return made

    async def delete(self, path: str, resource: str, body: Any) -> None:
        del self.objects[path]


async def test_a_job_whose_code_an_older_operator_does_not_know_is_taken_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    server: Any = Older()
    with pytest.raises(ApiError, match="is older than this command"):
        await send(server, "team", DDPJob(script="train.py", folder=tmp_path).submission(), replace=False, note=print)
    assert not [path for path in server.objects if "ddpjobs" in path]
