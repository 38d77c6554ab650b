"""What kubernetes-validate does, with each schema read once: for each object it reads two, of megabytes."""

from __future__ import annotations

from functools import cache

from kubernetes_validate import ValidationError, latest_version, utils, validate

utils.schema_contents = cache(utils.schema_contents)

__all__ = ["ValidationError", "latest_version", "validate"]
