"""The processes below the launcher: torchrun's agent, the worker that runs a script as a rank, and what ranks share.

Nothing here knows models, data or snapshots.
"""
