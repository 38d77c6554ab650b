"""GETs of the API server for what is asked again and again: kubectl takes a process for each, and a part of a core."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ddpjob_operator.runtime.login import Login, log_in

SECONDS = 60.0


def asked(kubeconfig: Path, path: str) -> Any | None:
    """The JSON that is answered to a GET of `path`; None where there is no answer, or a refusal."""
    login = _login(kubeconfig, kubeconfig.stat().st_mtime_ns)
    request = urllib.request.Request(login.server + path, headers=dict(login.headers))
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=login.tls) as answer:
            return json.load(answer)
    except (OSError, HTTPException):
        return None


@cache
def _login(kubeconfig: Path, written: int) -> Login:
    """As the file says that was written then."""
    with patch.dict(os.environ, {"KUBECONFIG": str(kubeconfig)}):
        return asyncio.run(log_in())
