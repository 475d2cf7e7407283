"""Generator of the screenshots in docs/images.

It starts a private broker, fills it, and runs the commands in an emulated terminal: what the
pictures show is what a person sees. Every picture has a fixed size.

    PYTHONPATH=tests python tools/make_screens.py        # all pictures; takes about three minutes
    PYTHONPATH=tests python tools/make_screens.py top    # some of them
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pulsar

from delaylevel import DelayLevelClient
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from support.screen_data import fill
from support.terminal import Terminal

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
#: Columns and lines of each picture.
SIZES = {"top": (80, 19), "horizon": (80, 18), "doctor": (80, 24), "demo": (80, 14)}
# Spark starts in ten seconds, or in minutes on a machine that is busy.
_PATIENCE_S = 900
_PROGRAM = (sys.executable, "-m", "delaylevel.cli.main")
# Colours of a dark terminal, each with a contrast of at least 4.5 to the background.
GROUND, TEXT, TITLE = "#10151c", "#d5dbe3", "#9aa5b1"
COLOURS = {
    "red": "#ff7b72",
    "green": "#56d364",
    "brown": "#e3b341",  # yellow, as pyte calls it
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
}
_FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
_EIGHTHS = "▏▎▍▌▋▊▉█"
# Sizes of a picture in pixels.
_CELL, _ROW, _MARGIN, _BAR = 8, 18, 14, 28


def main(names: Sequence[str]) -> None:
    """Make the named pictures, or all, and write them to docs/images."""
    names = names or list(SIZES)
    if "demo" in names:  # while its messages move from level to level
        with Terminal([*_PROGRAM, "demo"], *SIZES["demo"]) as terminal:
            terminal.wait_for(lambda rows: any(_delivered(row) > 1000 for row in rows), _PATIENCE_S)
            _save("demo", terminal, "delaylevel demo")
    if set(names) == {"demo"}:
        return
    with tempfile.TemporaryDirectory(prefix="delaylevel-screens-") as folder, ExitStack() as stack:
        broker = EmbeddedBroker("screens", directory=Path(folder) / "broker")
        connection = stack.enter_context(broker).connection
        environment = {
            "DELAYLEVEL_SERVICE_URL": connection.service_url,
            "DELAYLEVEL_ADMIN_URL": connection.admin_url,
        }
        fill(connection, 2000)
        if "doctor" in names:  # before anything runs, so that there is something to say
            _save_result("doctor", environment)
        run = stack.enter_context(Terminal([*_PROGRAM, "run", "orders"], 120, 24, environment))
        run.wait_for(lambda rows: any("moving" in row for row in rows), _PATIENCE_S)
        if "horizon" in names:
            _save_result("horizon", environment)
        if "top" not in names:
            return
        stack.enter_context(traffic(connection))
        command = [*_PROGRAM, "top", "orders", "--every", "1s"]
        top = stack.enter_context(Terminal(command, *SIZES["top"], environment))
        top.wait_for(lambda rows: any(_rate_of(row, "orders") > 10 for row in rows), _PATIENCE_S)
        _save("top", top, "delaylevel top orders")


def _save_result(name: str, environment: dict[str, str]) -> None:
    """Save a picture of a command that ends."""
    with Terminal([*_PROGRAM, name, "orders"], *SIZES[name], environment) as terminal:
        terminal.wait(_PATIENCE_S)
        _save(name, terminal, f"delaylevel {name} orders")


def _rate_of(row: str, stage: str) -> float:
    """Return the rate in a row of `top`; 0 if it is the row of another stage."""
    words = row.split()
    if len(words) < 5 or words[0] != stage or words[4] == "-":
        return 0.0
    return float(words[4].replace(",", ""))


def _delivered(row: str) -> int:
    words = row.replace(",", "").split()
    return int(words[words.index("delivered") - 1]) if "delivered" in words else 0


def _save(name: str, terminal: Terminal, title: str) -> None:
    picture = picture_of(terminal.screen, title)
    (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")
    print(f"docs/images/{name}.svg: {len(picture):,} bytes")


@contextmanager
def traffic(connection: Connection, per_second: int = 60) -> Iterator[None]:
    """Send delayed messages to ``orders``, and receive them, in the background."""
    over = threading.Event()

    def send() -> None:
        with DelayLevelClient.from_connection(connection, logger=logs.silent()) as client:
            producer = client.create_producer("orders", enable_delay_level_topic=True)
            for number in itertools.count():
                if over.wait(1 / per_second):
                    return
                delay = timedelta(seconds=3) if number % 2 else timedelta(hours=2 + number % 40)
                producer.send_async(b"pay me", lambda *_: None, deliver_after=delay)

    def receive() -> None:
        with contextlib.closing(connection.open_client(logger=logs.silent())) as client:
            consumer = client.subscribe("orders", "app", pulsar.ConsumerType.Shared)
            while not over.is_set():
                with contextlib.suppress(pulsar.Timeout):
                    consumer.acknowledge(consumer.receive(200))

    threads = [threading.Thread(target=each) for each in (send, receive)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join()


def picture_of(screen: Any, title: str) -> str:
    """Return a screen as SVG.

    Every word has a place of its own, and bars are rectangles: columns are aligned in any font.
    """
    width = screen.columns * _CELL + 2 * _MARGIN
    height = screen.lines * _ROW + 2 * _MARGIN + _BAR
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>text {{ font: 13px {_FONTS}; fill: {TEXT}; }}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
        f'<text x="{_MARGIN}" y="{_BAR - 6}" style="fill: {TITLE}">{escape(title)}</text>',
    ]
    for y in range(screen.lines):
        row = [screen.buffer[y][x] for x in range(screen.columns)]
        x = 0
        for (colour, kind), run in groupby(row, key=lambda cell: (cell.fg, _kind_of(cell.data))):
            text = "".join(cell.data for cell in run)
            if kind == "bar":
                lines.append(_bar(text, x, y, COLOURS.get(colour, TEXT)))
            elif kind == "word":
                lines.append(_word(text, x, y, COLOURS.get(colour)))
            x += len(text)
    return "\n".join([*lines, "</svg>", ""])


def _kind_of(one: str) -> str:
    return "space" if one == " " else "bar" if one in _EIGHTHS else "word"


def _bar(text: str, x: int, y: int, colour: str) -> str:
    length = sum(_CELL * (_EIGHTHS.index(one) + 1) / 8 for one in text)
    top = _BAR + _MARGIN + y * _ROW
    return (
        f'<rect x="{_MARGIN + x * _CELL}" y="{top + 2}" width="{length:g}" '
        f'height="{_ROW - 4}" fill="{colour}"/>'
    )


def _word(text: str, x: int, y: int, colour: str | None) -> str:
    fill = "" if colour is None else f' style="fill: {colour}"'
    return (
        f'<text x="{_MARGIN + x * _CELL}" y="{_BAR + _MARGIN + y * _ROW + 13}" '
        f'textLength="{len(text) * _CELL}"{fill}>{escape(text)}</text>'
    )


if __name__ == "__main__":
    main(sys.argv[1:])
