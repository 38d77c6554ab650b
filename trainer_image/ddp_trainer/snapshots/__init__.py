"""Snapshots that can be trusted: atomic, verified on load, fenced between attempts, written in the background.

`session.Snapshots` is what a training loop uses. Below it: `schedule` (when to save), `saving` and `resuming` (rank 0's
part), `sharded` (states that no rank holds whole), `codec` (live objects to bytes and back) and `trust` (files on the
volume: fence, manifest, checksums; without torch). Nothing here knows the training loop, its logs or its heartbeat.
"""
