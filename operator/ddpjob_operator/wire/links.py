"""Links from a job to other tools, as annotations: read for its page, written where it is submitted.

A browser runs what a link with another scheme holds, so that only http and https are links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ddpjob_operator.core.values.names import DOMAIN

ANNOTATION_PREFIX = f"links.{DOMAIN}/"
TITLE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 &._-]{0,38}[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,38}[A-Za-z0-9])?")
"""A title that the key of an annotation can end with."""
_FIELD = re.compile(r"\{(name|namespace|uid)\}")
_LONGEST = 2048
_MOST_OF_A_JOB = 8


@dataclass(frozen=True, slots=True)
class Link:
    """A link to show. `host` is where it leads."""

    title: str
    url: str
    host: str


def links_of_annotations(annotations: Mapping[str, object]) -> tuple[Link, ...]:
    """The links that a job says of itself, by title. What is none is left out."""
    given = sorted((key, url) for key, url in annotations.items() if key.startswith(ANNOTATION_PREFIX))
    found = (link(key.removeprefix(ANNOTATION_PREFIX), url) for key, url in given if isinstance(url, str))
    return tuple(each for each in found if each is not None)[:_MOST_OF_A_JOB]


def annotations_of_links(links: Mapping[str, str]) -> dict[str, str]:
    """The annotations from which the page of a job has these links, each a URL by its name.

    Raises:
        ValueError: the page would not show one of them. The message says which, and what to write.
    """
    for name, url in links.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name}={url}: {name!r} cannot be the end of an annotation's name; write at most 40 letters, digits, "
                "-, _ and ., beginning and ending with a letter or digit"
            )
        if not isinstance(url, str) or link(name, url) is None:
            raise ValueError(
                f"{name}={url}: this is no URL that begins with http:// or https://; write one, without a user, a "
                "space or a character that is not ASCII in it"
            )
        if (field := _FIELD.search(url)) is not None:
            raise ValueError(f"{name}={url}: {field[0]} is for links of all jobs; write what this job has there")
    if len(links) > _MOST_OF_A_JOB:
        raise ValueError(f"{len(links)} links are given, and a page shows {_MOST_OF_A_JOB}; leave out the others")
    return {f"{ANNOTATION_PREFIX}{name}": url for name, url in links.items()}


def link(title: str, url: str) -> Link | None:
    """The link, if a person can follow it knowingly: http or https, a host, no user in it, no hidden character."""
    host = host_of(url)
    return Link(title, url, host) if host and TITLE.fullmatch(title) else None


def host_of(url: str) -> str | None:
    """The host of such a URL, with its port."""
    # browsers drop some of these characters, and read a backslash as a slash: they would open something else
    if len(url) > _LONGEST or not url.isascii() or any(not "!" <= character <= "~" for character in url) or "\\" in url:
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    return parts.netloc if good else None
