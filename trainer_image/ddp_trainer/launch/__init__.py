"""Process 1 of a trainer pod: starts torchrun, supervises its ranks, serves /status, reports how the pod ended.

Imports neither torch nor anything that the ranks run: it must start in a fraction of a second and outlive their
crashes. `pod` runs attempts, `supervisor` watches one, `exit` finds its cause, `status` shows it.
"""
