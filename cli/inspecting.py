"""What the inspecting commands share: connecting quietly, progress, and how wide a terminal is."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import click

from delaylevel.model.clock import duration_ms
from delaylevel.topics.scan import DEFAULT_SLACK_MS

from .options import DURATION, Settings, require_reachable
from .output import Progress, progress

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
    """A progress bar on stderr, once it is known how much there is to read; a count until then.

    Nothing is drawn where stderr is no terminal, and for what is read in a moment.
    """

    _EVERY_S = 0.25
    _LEAST = 20_000

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._messages = 0
        self._said_at = time.monotonic()
        self._said = False
        self._bar: Progress | None = None
        self._drawing = contextlib.ExitStack()

    def expect(self, messages: int) -> None:
        """About so many messages will be read from now on."""
        self.close()
        self._messages = 0
        if messages >= self._LEAST:
            self._bar = self._drawing.enter_context(progress("Reading", messages))

    def tell(self, messages: int) -> None:
        """So many more were read."""
        self._messages += messages
        if self._bar is not None:
            self._bar.update(messages)
            return
        now = time.monotonic()
        if self._watched and now - self._said_at >= self._EVERY_S:
            self._said_at, self._said = now, True
            click.echo(f"\rRead {self._messages:,} messages", nl=False, err=True)

    def close(self) -> None:
        """End the bar's line, or wipe the count."""
        self._drawing.close()
        self._bar = None
        if self._said:
            self._said = False
            click.echo("\r" + " " * 40 + "\r", nl=False, err=True)


@contextmanager
def reading() -> Iterator[Reading]:
    """Progress of a long read; see :class:`Reading`."""
    shown = Reading()
    try:
        yield shown
    finally:
        shown.close()


def screen() -> tuple[int, bool]:
    """How wide stdout is, and whether somebody watches it."""
    watched = sys.stdout.isatty()
    return (shutil.get_terminal_size().columns if watched else 80), watched
