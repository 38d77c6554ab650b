"""A DDPJob on a cluster: `controller` makes one pass over one job. It decides from the `cache`, carries out the plan
with `apply`, and writes the status with `status_write`; `rejections` has the words for what the API server refuses,
and `owners` says whose an object is.

The cache is fed by watches, those of `child_watch` among them, by `resync`, which lists everything from time to time,
and by the answers to calls; `status_poll` requests the trainer's progress. Nothing here decides anything about a job,
or imports kopf.
"""
