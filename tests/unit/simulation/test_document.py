"""docs/goodput.md and its pictures are written from its figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import fields

import pytest
from tests.simulation import document
from tests.simulation.chart import Mark, by_interval, by_scope
from tests.simulation.parameters import Parameters

SVG = "{http://www.w3.org/2000/svg}"


def test_page_and_pictures_are_those_of_the_figures() -> None:
    stale = [path.name for path, text in document.files().items() if path.read_text() != text]
    assert stale == [], "run `python -m tests.simulation --draw`"


@pytest.mark.parametrize("picture", [document.BY_SCOPE, document.BY_INTERVAL], ids=lambda path: path.stem)
def test_a_picture_is_well_formed_and_fits_light_and_dark(picture: document.Path) -> None:
    root = ElementTree.fromstring(picture.read_text())
    assert root.find(f"{SVG}title") is not None
    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme: dark" in style
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height


def test_a_better_scope_is_drawn_further_to_the_right() -> None:
    scopes = [("Gang", Mark((0.8,)), Mark((0.7,), hollow=True)), ("Live", Mark((0.9,)), Mark((0.85,), hollow=True))]
    root = ElementTree.fromstring(by_scope([("a job", scopes)], ("fast", "slow")))
    _, _, gang, gang_slow, live, live_slow = (float(circle.attrib["cx"]) for circle in root.iter(f"{SVG}circle"))
    assert gang_slow < gang < live
    assert gang < live_slow < live


def test_a_higher_goodput_is_drawn_higher() -> None:
    points = [(60.0, Mark((0.8, 0.81, 0.82))), (600.0, Mark((0.9,)))]
    root = ElementTree.fromstring(by_interval(points, [("flat", "one", lambda interval: 0.85)], ("best", 300.0)))
    _, low, high = (float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle"))
    assert high < low


def test_every_parameter_has_its_source_in_the_page() -> None:
    page = document.PAGE.read_text()
    assert [item.name for item in fields(Parameters) if f"| `{item.name}` |" not in page] == []
    assert set(document._docstrings(Parameters)) == {item.name for item in fields(Parameters)}


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers of scopes"):
        document._between("# Goodput\n", "scopes", "| a |")
