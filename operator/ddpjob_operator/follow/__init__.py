"""What a person asks of a job on a cluster: why it is where it is, and what its ranks print.

Answers are pure functions of what the API server has; `read.py` alone asks it. Nothing here changes an object, and
nothing of the operator's own loop belongs here.
"""
