"""What in a cluster would stop a job of the caller in a namespace: `ddpjob doctor`.

`read.py` alone asks the API server, for `facts.py`. Each check is a pure function from the facts to one finding, in a
file by subject; `checkup.py` has them all, in the order of their report.
"""
