"""What the inspecting commands share: connecting quietly, progress, and how wide a terminal is."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import click

from delaylevel.clock import duration_ms
from delaylevel.pending_ranges import DEFAULT_SLACK_MS

from .options import DURATION, Settings, require_reachable
from .output import progress

if TYPE_CHECKING:
    from delaylevel.inspection import Inspector

F = TypeVar("F", bound=Callable[..., object])

target_option = click.option(
    "--target", metavar="TOPIC", help="Only what is for this business topic."
)


def slack_option(function: F) -> F:
    """Add ``--slack``, passed as ``slack``."""
    return click.option(
        "--slack",
        type=DURATION,
        default=timedelta(milliseconds=DEFAULT_SLACK_MS),
        show_default="1d",
        help="How far outages and clocks that differ may have displaced a message.",
    )(function)


@contextmanager
def inspector(
    settings: Settings,
    topic: str,
    target: str | None = None,
    slack: timedelta | None = None,
) -> Iterator[Inspector]:
    """An inspector of the cluster that the settings name; the client's own log stays away."""
    from delaylevel.inspection import Inspector

    connection = settings.connection()
    require_reachable(connection)
    logger = settings.client_kwargs(connection)["logger"]
    slack_ms = DEFAULT_SLACK_MS if slack is None else duration_ms(slack)
    with Inspector.connect(
        connection, topic, target=target, slack_ms=slack_ms, client_options={"logger": logger}
    ) as found:
        yield found


class Reading:
    """A progress bar that begins when it is known how much there is to read."""

    def __init__(self) -> None:
        self._context = progress("Reading", None)
        self._bar = self._context.__enter__()

    def expect(self, messages: int) -> None:
        """Begin: about so many messages will be read."""
        if messages > 0:
            self._context = progress("Reading", messages)
            self._bar = self._context.__enter__()

    def tell(self, messages: int) -> None:
        """Go on by so many."""
        self._bar.update(messages)

    def close(self) -> None:
        """End the bar's line."""
        self._context.__exit__(None, None, None)


@contextmanager
def reading() -> Iterator[Reading]:
    """A progress bar on stderr for a long read; nothing where stderr is no terminal."""
    bar = Reading()
    try:
        yield bar
    finally:
        bar.close()


class Counting:
    """A line on stderr that says how much was read, for reads of unknown length."""

    _EVERY_S = 0.25

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._messages = 0
        self._said_at = time.monotonic()
        self._said = False

    def tell(self, messages: int) -> None:
        """Count some more, and say so now and then."""
        self._messages += messages
        now = time.monotonic()
        if self._watched and now - self._said_at >= self._EVERY_S:
            self._said_at, self._said = now, True
            click.echo(f"\rRead {self._messages:,} messages", nl=False, err=True)

    def close(self) -> None:
        """Wipe the line."""
        if self._said:
            click.echo("\r" + " " * 40 + "\r", nl=False, err=True)


@contextmanager
def counting() -> Iterator[Counting]:
    """A counter on stderr for a long read; nothing where stderr is no terminal."""
    line = Counting()
    try:
        yield line
    finally:
        line.close()


def screen() -> tuple[int, bool]:
    """How wide stdout is, and whether somebody watches it."""
    watched = sys.stdout.isatty()
    return (shutil.get_terminal_size().columns if watched else 80), watched
