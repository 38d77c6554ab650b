"""A directory of snapshots that can be trusted: whole or not there, verified, owned by one attempt.

Without torch, so that people can list and verify snapshots anywhere and tests can kill a writer at each file operation.
"""
