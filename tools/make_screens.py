"""Generator of the screenshots in docs/images.

It starts a private broker, fills it, and runs the commands in an emulated terminal: what the
pictures show is what a person sees. Every picture has a fixed size.

python tools/make_screens.py            # all pictures; takes about three minutes
python tools/make_screens.py top   # some of them
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
if str(TOOLS) not in sys.path:
    sys.path.insert(0, str(TOOLS))

from screen_data import fill, traffic  # noqa: E402
from terminal_screen import Terminal  # noqa: E402

from delaylevel.broker.embedded import EmbeddedBroker  # noqa: E402
from delaylevel.cluster.connection.settings import Connection  # noqa: E402

IMAGES = TOOLS.parent / "docs" / "images"
#: Columns and lines of each picture.
SIZES = {
    "top": (80, 19),
    "horizon": (80, 18),
    "doctor": (80, 24),
    "demo": (80, 14),
}
# Spark starts in ten seconds, or in minutes on a machine that is busy.
_PATIENCE_S = 900
_PROGRAM = (sys.executable, "-m", "delaylevel.cli.main")


def open_terminal(name: str, *arguments: str, environment: dict[str, str]) -> Terminal:
    """Return a terminal of a picture's size that runs the program."""
    return Terminal([*_PROGRAM, *arguments], *SIZES[name], environment=environment)


def take(names: Sequence[str]) -> None:
    """Make pictures, and write them to docs/images."""
    IMAGES.mkdir(exist_ok=True)
    if "demo" in names:
        _save("demo", _demo())
    if set(names) - {"demo"}:
        with tempfile.TemporaryDirectory(prefix="delaylevel-screens-") as folder:
            broker = EmbeddedBroker("screens", directory=Path(folder) / "broker")
            with broker:
                _take_with(broker.connection, names)


def _take_with(connection: Connection, names: Sequence[str]) -> None:
    environment = {
        "DELAYLEVEL_SERVICE_URL": connection.service_url,
        "DELAYLEVEL_ADMIN_URL": connection.admin_url,
    }
    fill(connection, 2000)
    if "doctor" in names:  # before anything runs, so that there is something to say
        _save_result("doctor", environment)
    with ExitStack() as stack:
        run = stack.enter_context(Terminal([*_PROGRAM, "run", "orders"], 120, 24, environment))
        run.wait_for(_shows("moving"), _PATIENCE_S)
        if "horizon" in names:
            _save_result("horizon", environment)
        if "top" not in names:
            return
        stack.enter_context(traffic(connection))
        arguments = ("top", "orders", "--every", "1s")
        top = stack.enter_context(open_terminal("top", *arguments, environment=environment))
        top.wait_for(lambda rows: any(_rate_of(row, "orders") > 10 for row in rows), _PATIENCE_S)
        _save("top", top.picture("delaylevel top orders"))


def _save_result(name: str, environment: dict[str, str]) -> None:
    """Save a picture of a command that ends."""
    with open_terminal(name, name, "orders", environment=environment) as terminal:
        terminal.wait(_PATIENCE_S)
        _save(name, terminal.picture(f"delaylevel {name} orders"))


def _demo() -> str:
    """Return a picture of the demonstration while its messages move from level to level."""
    with Terminal([*_PROGRAM, "demo"], *SIZES["demo"]) as terminal:
        terminal.wait_for(lambda rows: any(_delivered(row) > 1000 for row in rows), _PATIENCE_S)
        return terminal.picture("delaylevel demo")


def _shows(*texts: str) -> Callable[[Sequence[str]], bool]:
    return lambda rows: any(text in row for text in texts for row in rows)


def _rate_of(row: str, stage: str) -> float:
    """Return the rate in a row of `top`; 0 if it is the row of another stage."""
    words = row.split()
    if len(words) < 5 or words[0] != stage or words[4] == "-":
        return 0.0
    return float(words[4].replace(",", ""))


def _delivered(row: str) -> int:
    words = row.replace(",", "").split()
    return int(words[words.index("delivered") - 1]) if "delivered" in words else 0


def _save(name: str, picture: str) -> None:
    path = IMAGES / f"{name}.svg"
    path.write_text(picture, encoding="utf-8")
    print(f"{path.relative_to(TOOLS.parent)}: {len(picture):,} bytes")


def main(names: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    unknown = set(names) - set(SIZES)
    if unknown:
        print(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
        return 2
    take(names or list(SIZES))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
