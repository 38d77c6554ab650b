"""`Job`: its connection is closed although nobody has called `close`, as in a notebook."""

from __future__ import annotations

import threading
from typing import cast

from ddpjob import AsyncJob, Job, sync
from ddpjob_operator.runtime.client import Client

SECONDS = 30.0


class Connection:
    def __init__(self) -> None:
        self.closed = threading.Event()

    async def close(self) -> None:
        self.closed.set()


def job_with(connection: Connection) -> Job:
    return Job(AsyncJob(cast("Client", connection), "ml", "train"))


def test_a_job_that_nobody_holds_any_more_is_closed() -> None:
    connection = Connection()
    job = job_with(connection)
    assert not connection.closed.is_set()
    del job
    assert connection.closed.wait(SECONDS)


def test_a_job_that_is_held_to_the_end_of_the_program_is_closed_then() -> None:
    connection = Connection()
    job = job_with(connection)
    sync._let_all_go()
    assert connection.closed.is_set()
    assert job.name == "train"
