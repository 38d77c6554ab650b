"""`ddpjob submit`: send a job with its code to a cluster, and follow it."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import suppress
from functools import partial

from ddpjob.handle import AsyncJob
from ddpjob_operator.cli.jobs import print_object
from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import FAILED, SUCCEEDED, Form
from ddpjob_operator.cli.terminal import print_line, print_note
from ddpjob_operator.follow.lines import Line, Wanted
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.submit.job import Submission
from ddpjob_operator.submit.pack import size_in_words
from ddpjob_operator.submit.send import send

_SECONDS_UNTIL_WHY = 5.0
"""A pod whose image is there starts sooner, and a person wonders later."""
_DURATION = re.compile(r" for [\w ]+:")
"""In a headline: how long it has been so. What is otherwise the same is not printed again."""


def submit(cluster: Cluster, submission: Submission, *, replace: bool, detach: bool, form: Form | None = None) -> int:
    """Send the job and print what its ranks print until it has ended; 0 if it has succeeded, 1 if it failed. With
    `form` print the object that is created, and nothing else.
    """
    name = submission.job.name
    for note in submission.code.left_out if submission.code else ():
        print_note(f"left out: {note}")

    async def ask(client: Client, namespace: str) -> int:
        given = submission.content["metadata"].get("namespace")
        place = given if cluster.namespace is None and given else namespace
        content = {**submission.content, "metadata": {**submission.content["metadata"], "namespace": place}}
        again = partial(cluster.command, namespace=place, default=client.namespace)
        try:
            sent = await send(
                client, place, Submission(submission.job, content, submission.code), replace=replace, note=print_note
            )
        except asyncio.CancelledError:  # Ctrl-C; one that it replaces may be deleted already
            print(f"stopped while {name} was sent; {again('get', name)} says whether it is there")
            raise
        if form is not None:
            print_object(sent.job, form)
            return SUCCEEDED
        if submission.code is not None:
            how = f"{size_in_words(sent.code_bytes)} sent" if sent.code_bytes else "already there"
            print(f"{submission.code.in_words} ({how})")
        verb = "created" if sent.replaced is None else f"created, in place of the one that was {sent.replaced}"
        print(f"{name} is {verb}: {submission.job.size_in_words} in namespace {place}")
        if detach:
            print(f"{again('logs', '-f', name)} shows its output, {again('watch', name)} its progress")
            return SUCCEEDED
        try:
            return await _follow(AsyncJob(client, place, name, sent.job["metadata"]["uid"]))
        except asyncio.CancelledError:
            print(f"{name} goes on; {again('logs', '-f', name)} shows its output again")
            raise

    return asked(cluster, ask)


async def _follow(job: AsyncJob) -> int:
    waiting = asyncio.create_task(_say_why_it_waits(job), name="say why it waits")

    def say(line: Line) -> None:
        waiting.cancel()
        print_line(line)

    try:
        succeeded = await (await job.all_logs(Wanted())).follow(say, print_note)
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError, ApiError):  # what it could not ask does not change how the job ended
            await waiting
    answer = await job.why()
    print(answer.headline if succeeded else answer.text(), file=sys.stdout if succeeded else sys.stderr)
    return SUCCEEDED if succeeded else FAILED


async def _say_why_it_waits(job: AsyncJob) -> None:
    """Until it is cancelled, which the first line of a rank does."""
    said = ""
    while True:
        await asyncio.sleep(_SECONDS_UNTIL_WHY)
        headline = (await job.why()).headline
        if (what := _DURATION.sub(":", headline)) != said:
            print_note(headline)
            said = what
