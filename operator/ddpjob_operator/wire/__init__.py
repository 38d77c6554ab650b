"""Kubernetes objects, as plain JSON, parsed into `core.values`. Raw dicts stop here: no decisions."""
