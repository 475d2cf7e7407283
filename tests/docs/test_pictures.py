"""The pictures match their descriptions, and can be read in light and dark."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from support.loading import load

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


TOOL = load("tools/make_picture.py")


@pytest.mark.parametrize("name", TOOL.NAMES)
def test_a_picture_is_current(name: str) -> None:
    text = (TOOL.IMAGES / f"{name}.txt").read_text(encoding="utf-8")
    picture = (TOOL.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert picture == TOOL.drawn(TOOL.described(text)), "not current: run `make reference`"


@pytest.mark.parametrize("name", TOOL.NAMES)
def test_a_picture_says_what_it_shows_and_has_its_own_background(name: str) -> None:
    root = ElementTree.parse(TOOL.IMAGES / f"{name}.svg").getroot()
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    rectangles = root.findall(f"{SVG}rect")
    ground = rectangles[0]
    assert (ground.get("class"), ground.get("width")) == ("ground", root.get("width"))
    for each in rectangles[1:]:
        assert float(each.attrib["x"]) + float(each.attrib["width"]) < float(root.attrib["width"])
    # Every colour of the light theme has one for the dark theme.
    light, dark = root.findtext(f"{SVG}style", "").split("@media (prefers-color-scheme: dark)")
    for kind in (".ground", "text", ".title", ".line", ".head", *(f".{k}" for k in TOOL.KINDS)):
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
        path = TOOL.IMAGES / f"{name}.svg"
        assert 0 < path.stat().st_size < 100_000
        root = ElementTree.parse(path).getroot()
        assert "delaylevel" in str(root.findtext(f"{SVG}title"))
        assert len(root.findall(f"{SVG}text")) > 20, "the screen was not empty"
        for each in root.findall(f"{SVG}text"):
            end = float(each.attrib["x"]) + float(each.get("textLength", 0))
            assert end <= float(root.attrib["width"])
        assert f"images/{name}.svg)" in pages, "no page shows it"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("circle a 0 0 topic Topic", "'circle'"),
        ("box a 0 0 planet Topic", "no kind planet"),
        ("box a 0 zero topic Topic", "zero"),
        (f"box a 0 0 topic Topic | {'long ' * 9}", "does not fit"),
        ("arrow a elsewhere", "no box"),
        ("box a", "line 2"),
    ],
)
def test_a_line_that_cannot_be_drawn_is_refused(line: str, why: str) -> None:
    with pytest.raises(TOOL.PictureError, match=why):
        TOOL.described(f"# a comment\n{line}")


def test_an_outdated_picture_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOOL.NAMES:
        text = (TOOL.IMAGES / f"{name}.txt").read_text(encoding="utf-8")
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(TOOL, "IMAGES", tmp_path)
    assert TOOL.main(["--check"]) == 1
    assert TOOL.main([]) == 0
    assert TOOL.main(["--check"]) == 0
    (tmp_path / "message-path.svg").write_text("something else", encoding="utf-8")
    assert TOOL.main(["--check"]) == 1
