"""Generator of the pictures in docs/images from their descriptions.

A description is a text file with one item on each line; message-path.txt explains the items. The
picture has the colours of the reader's light or dark theme, on a background of its own.

python tools/make_picture.py            # write the pictures
python tools/make_picture.py --check    # exit with 1 if a picture is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
NAMES = ("message-path",)

# Sizes in pixels.
WIDTH, HEIGHT = 164, 76  # of a box
GAP, ROW_GAP = 36, 84  # between boxes
MARGIN = 16
LINE = 17  # of text
LEGEND = 34
CHARACTER = 6.6  # the mean width of a character, in common fonts
BRANCH = 14  # distance between two arrows that leave a box on one side
HEAD = 8  # length of an arrow head

KINDS = ("application", "topic", "process")
_CORNERS = {"application": 4, "topic": 30, "process": 4}
STYLE = """
  .ground { fill: #ffffff; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #424a53; }
  .title { font-weight: 600; font-size: 14px; fill: #1f2328; }
  .box { stroke-width: 1.5; }
  .application { fill: #f6f8fa; stroke: #6e7781; }
  .topic { fill: #ddf4ff; stroke: #0969da; }
  .process { fill: #dafbe1; stroke: #1a7f37; stroke-width: 2.5; }
  .line { fill: none; stroke: #57606a; stroke-width: 1.5; }
  .head { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; }
    text { fill: #c9d1d9; }
    .title { fill: #f0f6fc; }
    .application { fill: #161b22; stroke: #8b949e; }
    .topic { fill: #0c2d6b; stroke: #58a6ff; }
    .process { fill: #04260f; stroke: #3fb950; }
    .line { stroke: #8b949e; }
    .head { fill: #8b949e; }
  }
"""  # noqa: E501


class PictureError(ValueError):
    """A line of a description that cannot be drawn."""


@dataclass(frozen=True)
class Box:
    """A box of a picture.

    Attributes:
        column, row: its place in the grid.
        kind: one of `KINDS`.
        lines: the title, then the details.
    """

    column: int
    row: int
    kind: str
    lines: tuple[str, ...]

    @property
    def left(self) -> int:
        """The x coordinate of its left side."""
        return MARGIN + self.column * (WIDTH + GAP)

    @property
    def top(self) -> int:
        """The y coordinate of its upper side."""
        return MARGIN + self.row * (HEIGHT + ROW_GAP)

    @property
    def centre(self) -> tuple[int, int]:
        """The coordinates of its centre."""
        return self.left + WIDTH // 2, self.top + HEIGHT // 2


@dataclass
class Picture:
    """A described picture.

    Attributes:
        title: the title, for screen readers.
        about: the sentences that say the same as the picture, for screen readers.
        legend: kinds and their meanings.
        boxes: the boxes by name.
        arrows: item (`arrow` or `bend`), names of two boxes, and label.
    """

    title: str = ""
    about: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[tuple[str, str, str, str]] = field(default_factory=list)


def described(text: str) -> Picture:
    """Return the picture that a text describes.

    Raises:
        PictureError: a line is not understood.
    """
    picture = Picture()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            _ITEMS[words[0]](picture, words)
        except (KeyError, ValueError, IndexError) as error:
            raise PictureError(f"line {number} is not understood: {line!r} ({error})") from error
    return picture


def _title(picture: Picture, words: list[str]) -> None:
    picture.title = " ".join(words[1:])


def _about(picture: Picture, words: list[str]) -> None:
    picture.about.append(" ".join(words[1:]))


def _legend(picture: Picture, words: list[str]) -> None:
    picture.legend.append((_kind(words[1]), " ".join(words[2:])))


def _box(picture: Picture, words: list[str]) -> None:
    lines = tuple(part.strip() for part in " ".join(words[5:]).split("|"))
    if max(map(len, lines)) * CHARACTER > WIDTH - 8 or LINE * len(lines) > HEIGHT - LINE:
        raise ValueError("the text does not fit the box")
    picture.boxes[words[1]] = Box(int(words[2]), int(words[3]), _kind(words[4]), lines)


def _arrow(picture: Picture, words: list[str]) -> None:
    missing = {*words[1:3]} - set(picture.boxes)
    if missing:
        raise ValueError(f"no box {min(missing)}")
    picture.arrows.append((words[0], words[1], words[2], " ".join(words[3:])))


def _kind(word: str) -> str:
    if word not in KINDS:
        raise ValueError(f"no kind {word}")
    return word


_ITEMS: dict[str, Callable[[Picture, list[str]], None]] = {
    "title": _title,
    "about": _about,
    "legend": _legend,
    "box": _box,
    "arrow": _arrow,
    "bend": _arrow,
}


def drawn(picture: Picture) -> str:
    """Return the SVG of a picture."""
    right = max(box.left for box in picture.boxes.values()) + WIDTH + MARGIN
    bottom = max(box.top for box in picture.boxes.values()) + HEIGHT + MARGIN
    height = bottom + (LEGEND if picture.legend else 0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {height}" '
        f'width="{right}" height="{height}" role="img" aria-labelledby="title about">',
        "<!-- Generated by tools/make_picture.py: `make reference`. Do not edit. -->",
        f'<title id="title">{escape(picture.title)}</title>',
        f'<desc id="about">{escape(" ".join(picture.about))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{right}" height="{height}" rx="8"/>',
    ]
    for item, start, end, label in picture.arrows:
        lines += _drawn_arrow(item, picture.boxes[start], picture.boxes[end], label)
    for box in picture.boxes.values():
        lines += _drawn_box(box)
    lines += _drawn_legend(picture.legend, bottom)
    return "\n".join([*lines, "</svg>", ""])


def _drawn_box(box: Box) -> Iterator[str]:
    x, y = box.centre
    yield (
        f'<rect class="box {box.kind}" x="{box.left}" y="{box.top}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="{_CORNERS[box.kind]}"/>'
    )
    first = y - LINE * (len(box.lines) - 1) / 2 + 5
    for index, line in enumerate(box.lines):
        mark = ' class="title"' if index == 0 else ""
        yield _text(x, first + LINE * index, line, f'text-anchor="middle"{mark}')


def _drawn_arrow(item: str, start: Box, end: Box, label: str) -> Iterator[str]:
    (x, y), (to_x, to_y) = start.centre, end.centre
    if item == "bend":
        y += BRANCH
        yield from _line([(start.left + WIDTH, y), (to_x, y), (to_x, end.top)], (0, 1))
        # Above the line, the label would touch that of another arrow.
        yield _text(start.left + WIDTH + GAP // 3, y + LINE, label)
    elif start.row == end.row:
        # The arrow of a box that another arrow leaves too is moved up.
        y -= BRANCH if end.column - start.column > 1 else 0
        yield from _line([(start.left + WIDTH, y), (end.left, y)], (1, 0))
        yield _text(start.left + WIDTH + GAP // 3, y - 7, label)
    else:
        down = end.row > start.row
        yield from _line(
            [(x, start.top + (HEIGHT if down else 0)), (x, end.top + (0 if down else HEIGHT))],
            (0, 1 if down else -1),
        )
        yield _text(x + 9, (y + to_y) / 2 + 5, label)


def _line(points: list[tuple[int, int]], ahead: tuple[int, int]) -> Iterator[str]:
    """Yield a line and its head, which points to a direction (dx, dy)."""
    (x, y), (dx, dy) = points[-1], ahead
    base_x, base_y = x - dx * HEAD, y - dy * HEAD
    path = " L".join(f"{a} {b}" for a, b in [*points[:-1], (base_x, base_y)])
    yield f'<path class="line" d="M{path}"/>'
    side_x, side_y = dy * HEAD // 2, dx * HEAD // 2
    yield (
        f'<path class="head" d="M{x} {y} L{base_x + side_x} {base_y + side_y} '
        f'L{base_x - side_x} {base_y - side_y} Z"/>'
    )


def _drawn_legend(legend: list[tuple[str, str]], top: int) -> Iterator[str]:
    x = float(MARGIN)
    for kind, meaning in legend:
        corner = min(_CORNERS[kind], 7)
        yield (
            f'<rect class="box {kind}" x="{x:g}" y="{top + 3}" width="22" height="14" '
            f'rx="{corner}"/>'
        )
        yield _text(x + 30, top + 15, meaning)
        x += 30 + len(meaning) * CHARACTER + 24


def _text(x: float, y: float, text: str, more: str = "") -> str:
    marks = f" {more}" if more else ""
    return (
        f'<text x="{x:g}" y="{y:g}"{marks}>{escape(text.replace("`", ""))}</text>' if text else ""
    )


def main(arguments: list[str]) -> int:
    """Write or check the pictures; return the exit code."""
    stale = []
    for name in NAMES:
        picture = described((IMAGES / f"{name}.txt").read_text(encoding="utf-8"))
        path, text = IMAGES / f"{name}.svg", drawn(picture)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in arguments:
            stale.append(path.name)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"docs/images/{path.name} written", file=sys.stderr)
    if stale:
        print(f"not up to date: {', '.join(stale)}; run `make reference`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
