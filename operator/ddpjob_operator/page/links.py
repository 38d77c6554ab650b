"""Links from a job to other tools: Grafana, TensorBoard, W&B, MLflow.

They come from the settings of the dashboard, as templates, and from the job, as annotations. A browser runs what a link
with another scheme holds, so that only http and https are links, and each says which host it leads to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

ANNOTATION_PREFIX = "links.training.ddpjob.io/"
_LONGEST = 2048
_MOST_OF_A_JOB = 8
_TITLE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 &._-]{0,38}[A-Za-z0-9])?")
_FIELD = re.compile(r"\{([^{}]*)\}")
_FIELDS = ("name", "namespace", "uid")


@dataclass(frozen=True, slots=True)
class Link:
    """A link to show. `host` is where it leads."""

    title: str
    url: str
    host: str


@dataclass(frozen=True, slots=True)
class LinkTemplate:
    """A link of every job; `{name}`, `{namespace}` and `{uid}` are the job's."""

    title: str
    url: str

    def of(self, namespace: str, name: str, uid: str) -> Link | None:
        """The link of one job; None if it has no uid, and the link needs one."""
        values = {"name": name, "namespace": namespace, "uid": uid}
        if any(not values[field] for field in _FIELD.findall(self.url)):
            return None
        # whole values are quoted, so that none becomes another part of the URL
        return link(self.title, _FIELD.sub(lambda field: quote(values[field[1]], safe=""), self.url))


def parse_template(text: str) -> LinkTemplate:
    """`TITLE=URL`.

    Raises:
        ValueError: it is none; the message says what is wrong.
    """
    title, found, url = text.partition("=")
    if not found or not _TITLE.fullmatch(title):
        raise ValueError(f"{text!r}: write TITLE=URL, with a title of at most 40 letters and digits")
    unknown = [field for field in _FIELD.findall(url) if field not in _FIELDS]
    if unknown:
        raise ValueError(f"{text!r}: {{{unknown[0]}}} is unknown; write {{name}}, {{namespace}} or {{uid}}")
    where = _host_of(url)
    if where is None or link(title, _FIELD.sub("x", url)) is None:
        raise ValueError(f"{text!r}: this is no URL that begins with http:// or https://")
    if _FIELD.search(where):
        raise ValueError(f"{text!r}: the host of a link cannot depend on the job")
    return LinkTemplate(title, url)


def links_of_annotations(annotations: Mapping[str, object]) -> tuple[Link, ...]:
    """The links that a job says of itself, by title. What is none is left out."""
    given = sorted((key, url) for key, url in annotations.items() if key.startswith(ANNOTATION_PREFIX))
    found = (link(key.removeprefix(ANNOTATION_PREFIX), url) for key, url in given if isinstance(url, str))
    return tuple(each for each in found if each is not None)[:_MOST_OF_A_JOB]


def all_links(
    templates: Iterable[LinkTemplate], own: Iterable[Link], namespace: str, name: str, uid: str
) -> tuple[Link, ...]:
    """Those of every job, then the job's own."""
    common = (template.of(namespace, name, uid) for template in templates)
    return (*(each for each in common if each is not None), *own)


def link(title: str, url: str) -> Link | None:
    """The link, if a person can follow it knowingly: http or https, a host, no user in it, no hidden character."""
    host = _host_of(url)
    return Link(title, url, host) if host and _TITLE.fullmatch(title) else None


def _host_of(url: str) -> str | None:
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
