"""Who answers for a job that is sent: an annotation, which the metrics of the operator show."""

from __future__ import annotations

import getpass

from ddpjob_operator.api.spec import LONGEST_OWNER, OWNER_ANNOTATION
from ddpjob_operator.submit.job import Content


def with_owner(content: Content, owner: str) -> Content:
    """The job with this owner; with none if it is empty, and then no user becomes it.

    Raises:
        ValueError: the job names one already, or metrics would not show this one as it is.
    """
    if OWNER_ANNOTATION in _annotations(content):
        raise ValueError(f"the job names one already, in the annotation {OWNER_ANNOTATION}; leave out one of them")
    owner = owner.strip()
    if len(owner) > LONGEST_OWNER:
        raise ValueError(f"has {len(owner)} characters; write at most {LONGEST_OWNER}")
    if not owner.isprintable():
        raise ValueError(f"{owner!r} has characters that cannot be printed; leave them out")
    return _annotated(content, owner)


def with_user(content: Content, user: str) -> Content:
    """The job with the user who sends it as its owner, as far as the name can be shown, unless it says who that is."""
    owner = "".join(character for character in user if character.isprintable()).strip()[:LONGEST_OWNER]
    return _annotated(content, owner) if owner and OWNER_ANNOTATION not in _annotations(content) else content


def local_user() -> str:
    """The user's name on this machine; empty if it has none, as a user of a container may."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # before Python 3.13 the latter two
        return ""


def _annotations(content: Content) -> dict[str, str]:
    return content["metadata"].get("annotations") or {}


def _annotated(content: Content, owner: str) -> Content:
    annotations = {**_annotations(content), OWNER_ANNOTATION: owner}
    return {**content, "metadata": {**content["metadata"], "annotations": annotations}}
