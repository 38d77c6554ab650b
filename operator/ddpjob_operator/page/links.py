"""Links from a job to other tools: Grafana, TensorBoard, W&B, MLflow.

They come from the settings of the dashboard, as templates, and from the job, as annotations (`wire.links`). Each says
which host it leads to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from ddpjob_operator.wire.links import TITLE, Link, host_of, link

_FIELD = re.compile(r"\{([^{}]*)\}")
_FIELDS = ("name", "namespace", "uid")


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
    if not found or not TITLE.fullmatch(title):
        raise ValueError(f"{text!r}: write TITLE=URL, with a title of at most 40 letters and digits")
    unknown = [field for field in _FIELD.findall(url) if field not in _FIELDS]
    if unknown:
        raise ValueError(f"{text!r}: {{{unknown[0]}}} is unknown; write {{name}}, {{namespace}} or {{uid}}")
    where = host_of(url)
    if where is None or link(title, _FIELD.sub("x", url)) is None:
        raise ValueError(f"{text!r}: this is no URL that begins with http:// or https://")
    if _FIELD.search(where):
        raise ValueError(f"{text!r}: the host of a link cannot depend on the job")
    return LinkTemplate(title, url)


def all_links(
    templates: Iterable[LinkTemplate], own: Iterable[Link], namespace: str, name: str, uid: str
) -> tuple[Link, ...]:
    """Those of every job, then the job's own."""
    common = (template.of(namespace, name, uid) for template in templates)
    return (*(each for each in common if each is not None), *own)
