"""What a job has printed, once its pods are gone: from the job's volume, which a short-lived pod reads."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH
from ddpjob_operator.core.manifests.volume_pod import VolumeCommand, build_claim_pod, build_volume_pod
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.follow.lines import Line, Wanted
from ddpjob_operator.follow.reader import claim_of, image_of, image_with, read_claim, refuse_beyond_bounds
from ddpjob_operator.follow.volume_pod import FREE, Note, exit_code, log_of, started_pod
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

_ROLE = "logs"
_LINE = re.compile(r"\[rank (\d{1,7})\] ")
_PROBLEM = "error: "
"""What `ddp_trainer.logs.pods` says last where the volume has no such log."""


def may_be_on_volume_alone(status: DDPJobStatus, wanted: Wanted) -> bool:
    """Whether a job without wanted pods had some, whose logs its volume has."""
    return status.is_final or status.phase is Phase.SUSPENDED or wanted.is_before(status.attempt)


@dataclass(frozen=True, slots=True)
class VolumeLogs:
    """The logs on a volume. A caller that stops reading early closes the generator, which deletes the pod."""

    client: Client
    namespace: str
    wanted: Wanted
    image: str | None
    """Of the pod that reads; None is that of the job."""
    note: Note

    async def of_job(self, found: Json, pods: Sequence[Json]) -> AsyncGenerator[Line, None]:
        """The wanted lines of a job.

        Raises:
            ApiError: the pod could not be made or did not start, or the volume is gone, or has no such log.
        """
        try:
            job = parse_job(found)
        except InvalidJob as error:
            raise ApiError(422, "Invalid", f"{found['metadata']['name']}: {'; '.join(error.problems)}") from error
        refuse_beyond_bounds(job)
        used = self.image or job.spec.image or image_of(pods)
        try:
            # a pod whose claim is gone would wait for minutes
            claim = await read_claim(self.client, self.namespace, claim_of(job))
            used = used or image_with(claim, job.name)
        except ApiError as error:
            if error.status != 403 or used is None:
                raise
        attempt = job.status.attempt if self.wanted.attempt is None else self.wanted.attempt
        manifest = build_volume_pod(job, used, _command(job.name, self.wanted, attempt))
        advice = FREE
        # with the scope Job its logs are not where --claim looks
        if "nodeSelector" in manifest["spec"] and job.spec.shared.scope != "Job":
            advice += f"; another node may read it: ddpjob logs {job.name} --claim {claim_of(job)}"
        async with aclosing(self._read(manifest, claim_of(job), job.spec.ranks_per_node, advice)) as lines:
            async for line in lines:
                yield line

    async def of_claim(self, name: str, claim: str | None) -> AsyncGenerator[Line, None]:
        """The same of a job that is gone, by its claim: `claim`, or the one that the operator made for it."""
        found = await read_claim(self.client, self.namespace, claim or pvc_name(name))
        command = _command(name, self.wanted, self.wanted.attempt)
        manifest = build_claim_pod(found, self.image or image_with(found, name), command)
        async with aclosing(self._read(manifest, found["metadata"]["name"], None, FREE)) as lines:
            async for line in lines:
                yield line

    async def _read(
        self, manifest: Json, claim: str, ranks_per_node: int | None, advice: str
    ) -> AsyncGenerator[Line, None]:
        self.note(f"a short-lived pod reads the logs from the volume, claim {claim}; Ctrl-C deletes it")
        is_shown, other = False, ""
        async with started_pod(self.client, self.namespace, manifest, advice, self.note) as path:
            async with aclosing(log_of(self.client, path, _ROLE)) as texts:
                async for text in texts:
                    if found := _LINE.match(text):
                        is_shown, rank = True, int(found[1])
                        yield Line("", rank // ranks_per_node if ranks_per_node else 0, rank, text[found.end() :])
                        continue
                    other = text.removeprefix(_PROBLEM)
                    if other == text:
                        self.note(text)
            code = await exit_code(self.client, path, _ROLE)
        if code:
            raise ApiError(0, "NoLogs", other or f"the pod that reads the volume ended with exit code {code}")
        if not is_shown:
            self.note("no line on the volume matches")


def _command(name: str, wanted: Wanted, attempt: int | None) -> VolumeCommand:
    """The lines are chosen in the pod: the log of a pod is no way for gigabytes."""
    chosen = {
        "attempt": attempt,
        "node": wanted.node,
        "rank": wanted.rank,
        "grep": wanted.pattern.pattern if wanted.pattern is not None else None,
        "tail": wanted.tail,
        "since": wanted.since_seconds,
    }
    # with =, as a pattern may begin with a dash; $$, because Kubernetes reads $(NAME)
    options = (f"--{option}={value}".replace("$", "$$") for option, value in chosen.items() if value is not None)
    return VolumeCommand(_ROLE, "ddp_trainer.logs.pods", (SHARED_PATH, name, *options))
