"""Snapshots that can be trusted: atomic, verified on load, fenced between attempts, written behind training's back.

From the outside in: `session.Snapshots` is what a training loop uses. `state` and `buffers` turn live objects into
bytes, `background` writes them while training goes on, `store` makes a directory of files appear at once or not at
all, `fence` keeps an older attempt from writing, `manifest` and `disk` are the format and the file operations
below. Everything up to `store` is free of torch, so that people can list and verify snapshots anywhere and tests
can kill a writer at every single file operation.
"""
