"""What holds for every page, in a real browser: accessible by the rules of axe-core, and as wide as its window.

https://github.com/dequelabs/axe-core. It measures colours as they are drawn, so that light and dark are two pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from tests.support.browser import Tab
from tests.support.tiers import cannot_run

FORMS = tuple(product(("light", "dark"), (1280, 390)))
"""Colours, and the width of a screen and of a phone."""
_VIOLATIONS = """
axe.run().then(found => found.violations.map(each => [each.id, each.help, each.nodes.map(node => node.html)]))
"""
_ENDLESS = """
document.getAnimations().filter(each => each.effect.getComputedTiming().endTime > 5000).map(each => each.animationName)
"""


@cache
def axe() -> str:
    """The script of axe-core. Without it, a test cannot run."""
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        cannot_run("browser", "axe-core-python is not installed; `make test` installs it")
    return (Path(found.origin).parent / "axe.min.js").read_text()


async def looks_right(tab: Tab, url: str, forms: Iterable[tuple[str, int]] = FORMS) -> None:
    """Open a page in each form, and look at it."""
    for scheme, width in forms:
        await tab.open(url, width, scheme)
        await tab.run(f"{axe()};0")
        assert await tab.run(_VIOLATIONS) == [], (url, scheme, width)
        await comes_to_rest(tab)
        # of a phone, the inner width grows with what does not fit
        needed = await tab.run("document.documentElement.scrollWidth")
        assert needed <= width, f"{url} is {needed} wide in a window of {width}"
    assert tab.complaints == []


async def comes_to_rest(tab: Tab) -> None:
    """No animation of its page takes more than five seconds: WCAG 2.2, criterion 2.2.2. axe-core does not check it."""
    assert await tab.run(_ENDLESS) == []
