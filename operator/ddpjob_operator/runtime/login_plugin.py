"""Login plugins of kubeconfigs (`exec`), run as kubectl runs them.

What one says on standard error is shown while it runs: it may be the code that a person has to type in a browser. Its
standard input is the terminal, if there is one and the plugin may use it. A terminal is its standard error, too: a
browser that it has opened, and leaves open, holds that, and is not waited for.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_KEPT = 1000
"""Characters of what a plugin says that are kept for the error, in which its last line is."""
_SECONDS_TO_END = 1.0
"""For a plugin that is killed. What it has started may hold its standard output for longer."""


class PluginError(Exception):
    """It gave no credentials; in words."""


async def credentials(plugin: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """What the plugin answers: the status of its ExecCredential (client.authentication.k8s.io). A command with a path
    that is not absolute is below `folder`, that of the kubeconfig.

    Raises:
        PluginError: it is not installed, failed, or answered something else.
    """
    command, version = plugin.get("command"), plugin.get("apiVersion")
    if not command or not version:
        raise PluginError("the exec of its user has no command or no apiVersion")
    command = str(folder / str(command)) if os.sep in str(command) else str(command)
    interactive = plugin.get("interactiveMode") != "Never" and os.isatty(0)  # which it inherits, whatever sys.stdin is
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": interactive}}
    own = {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
    try:
        process = await asyncio.create_subprocess_exec(
            command,
            *map(str, plugin.get("args") or ()),
            env={**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            stdin=None if interactive else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if sys.stderr is not None and sys.stderr.isatty() else asyncio.subprocess.PIPE,
        )
    except OSError as error:
        hint = f"; {plugin['installHint']}" if plugin.get("installHint") else "; install it, and see that PATH has it"
        raise PluginError(f"its login plugin {command} cannot be run: {error.strerror}{hint}") from error
    assert process.stdout is not None
    try:
        answer, said, code = await asyncio.gather(process.stdout.read(), _shown(process.stderr), process.wait())
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, TimeoutError):
                process.kill()
                await asyncio.wait_for(process.wait(), _SECONDS_TO_END)
    if code:
        why = f": {said}" if said else ""
        raise PluginError(f"its login plugin {command} ended with exit code {code}{why}; log in as for kubectl")
    return _status(command, str(version), answer)


def _status(command: str, version: str, answer: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(answer)
        status = found.get("status") or {}
        is_certificate = bool(status.get("clientCertificateData") and status.get("clientKeyData"))
        has_credentials = bool(status.get("token")) or is_certificate
    except (ValueError, AttributeError) as error:
        raise PluginError(f"its login plugin {command} answered no ExecCredential: {error}") from error
    if found.get("apiVersion") != version:
        said = f"answered with apiVersion {found.get('apiVersion')}, and the kubeconfig says {version}"
        raise PluginError(f"its login plugin {command} {said}; write the kubeconfig anew")
    if not has_credentials:
        raise PluginError(f"its login plugin {command} answered neither a token nor a certificate with its key")
    return dict(status)


async def _shown(stream: asyncio.StreamReader | None) -> str:
    """Pass on what it says as it comes; its last line. On a terminal it speaks for itself."""
    if stream is None:
        return ""
    decoder, said = codecs.getincrementaldecoder("utf-8")("replace"), ""
    while block := await stream.read(2**12):
        text = decoder.decode(block)
        print(text, end="", file=sys.stderr, flush=True)
        said = (said + text)[-_KEPT:]
    lines = said.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
