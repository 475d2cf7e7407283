"""The pictures can be read in light and dark, and pages show them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


IMAGES = ROOT / "docs" / "images"


def test_the_picture_says_what_it_shows_and_has_its_own_background() -> None:
    root = ElementTree.parse(IMAGES / "message-path.svg").getroot()
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    rectangles = root.findall(f"{SVG}rect")
    ground = rectangles[0]
    assert (ground.get("class"), ground.get("width")) == ("ground", root.get("width"))
    for each in rectangles[1:]:
        assert float(each.attrib["x"]) + float(each.attrib["width"]) < float(root.attrib["width"])
    # Every colour of the light theme has one for the dark theme.
    light, dark = root.findtext(f"{SVG}style", "").split("@media (prefers-color-scheme: dark)")
    for kind in (".ground", "text", ".title", ".line", ".head", ".application", ".topic"):
        assert f"{kind} {{" in light
        assert f"{kind} {{" in dark


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_the_path_of_a_message_is_shown(page: str) -> None:
    assert "images/message-path.svg)" in (ROOT / page).read_text(encoding="utf-8")
