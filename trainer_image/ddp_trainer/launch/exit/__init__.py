"""Why an attempt ended in this pod: the evidence, its root cause, and the termination message."""
