"""Decisions: one DDPJob, what was observed of its children and the time in; a `Plan` out.

Nothing here reads a clock, a file or a socket, knows kopf or a client, or takes in a Kubernetes object as a dict
(`wire` parses those). From the top, and each may use only what is below it: `plan` (which stage decides), `stages`,
`gang` and `ledger`, `failure`, `manifests`, `values`. All change phase, attempt and conditions through `transitions`.
"""
