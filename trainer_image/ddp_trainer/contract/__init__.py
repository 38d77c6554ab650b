"""What launcher, ranks and initializers share: exit codes, environment, run directory, heartbeats, outcomes.

No torch, and nothing of another package of ddp_trainer: everything may import it.
"""
