"""The pictures can be read in light and dark, and pages show them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from support.loading import load

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


def test_the_screenshots_are_small_and_shown() -> None:
    pages = "".join(
        page.read_text(encoding="utf-8")
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    )
    for name in load("tools/make_screens.py").SIZES:
        path = IMAGES / f"{name}.svg"
        assert 0 < path.stat().st_size < 100_000
        root = ElementTree.parse(path).getroot()
        assert "delaylevel" in str(root.findtext(f"{SVG}title"))
        assert len(root.findall(f"{SVG}text")) > 20, "the screen was not empty"
        for each in root.findall(f"{SVG}text"):
            end = float(each.attrib["x"]) + float(each.get("textLength", 0))
            assert end <= float(root.attrib["width"])
        assert f"images/{name}.svg)" in pages, "no page shows it"
