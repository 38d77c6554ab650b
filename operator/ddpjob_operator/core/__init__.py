"""Decisions: one DDPJob, what was seen of its children and the time in; a `Plan` out.

Nothing here reads a clock, a file or a socket, knows kopf or a client, or takes in a Kubernetes object as a dict
(`wire` parses those). The rooms, each of which may use only those below it: `plan` (the order in which things are
decided), `stages`, `gang` and `ledger`, `failure`, `manifests`, `values`.
"""
