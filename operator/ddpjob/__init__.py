"""Submit and follow DDPJobs from Python.

    from ddpjob import DDPJob

    job = DDPJob(script="train.py", nodes=2, args=["--lr", "3e-4"]).submit()
    for line in job.logs():
        print(line)
    print(job.wait().progress)

`Job` blocks, also in a notebook; `AsyncJob` has the same methods for asyncio. It needs the extra `cli`.
"""

import sys

try:
    from ddpjob.definition import DDPJob
    from ddpjob.handle import AsyncJob, JobFailed
    from ddpjob.sync import Job
    from ddpjob_operator.follow.volume_snapshots import Snapshot
    from ddpjob_operator.runtime.errors import ApiError
    from ddpjob_operator.submit.check import BadJob
except ModuleNotFoundError as error:
    if (error.name or "").startswith("ddpjob"):
        raise
    raise ModuleNotFoundError(
        f"{error.name}: not installed for {sys.executable}; "
        "install ddpjob[cli], as `pip install '.[cli]'` in a checkout does",
        name=error.name,
    ) from None

__all__ = ["ApiError", "AsyncJob", "BadJob", "DDPJob", "Job", "JobFailed", "Snapshot"]
