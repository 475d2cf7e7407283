"""Helpers of the commands that inspect pending messages: the inspector, progress, the terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from delaylevel.cluster.connection import require_reachable
from delaylevel.model.formatting import exact_duration
from delaylevel.topics.scan import DEFAULT_SLACK_MS

from .command import Settings
from .delivery import note_undelivered
from .output import progress
from .values import DURATION_MS

if TYPE_CHECKING:
    from delaylevel.inspection import Inspector

target_option = click.option("--target", metavar="TOPIC", help="Business topic to match.")

slack_option = click.option(
    "--slack",
    "slack_ms",
    type=DURATION_MS,
    default=exact_duration(DEFAULT_SLACK_MS),
    help="Longest outage or clock difference that a search by due time allows for.",
)


def inspector(settings: Settings, topic: str, **options: Any) -> Inspector:
    """Open an inspector of the configured cluster, with the client's log kept off stdout.

    The options are ``target``, ``slack_ms``, ``live`` and ``live_token``, as for ``Inspector``.
    """
    from delaylevel.inspection import Inspector

    connection = settings.connection()
    require_reachable(connection)
    client_options = {"logger": settings.client_logger()}
    return Inspector.connect(connection, topic, client_options=client_options, **options)


def note_delivery(look: Inspector, topic: str) -> None:
    """Print a note on stderr if the messages of an inspector's level topic are not delivered."""
    note_undelivered(look.admin, look.description, topic)


class Reading:
    """Progress of a read on stderr: a bar if the number of messages is known, else a count.

    Nothing is drawn if stderr is not a terminal, or for a read that ends at once.
    """

    _EVERY_S = 0.25
    _LEAST = 20_000

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._messages = 0
        self._drawn_at = time.monotonic()
        self._drawn = False
        self._bar: Any = None
        self._drawing = contextlib.ExitStack()

    def expect(self, messages: int) -> None:
        """Set the estimated number of messages that follow."""
        self.close()
        self._messages = 0
        if messages >= self._LEAST:
            self._bar = self._drawing.enter_context(progress("Reading", messages))

    def tell(self, messages: int) -> None:
        """Add a number of messages that were read."""
        self._messages += messages
        if self._bar is not None:
            self._bar.update(messages)
            return
        now = time.monotonic()
        if self._watched and now - self._drawn_at >= self._EVERY_S:
            self._drawn_at, self._drawn = now, True
            click.echo(f"\rRead {self._messages:,} messages", nl=False, err=True)

    def close(self) -> None:
        """End the bar's line, or erase the count."""
        self._drawing.close()
        self._bar = None
        if self._drawn:
            self._drawn = False
            click.echo("\r" + " " * 40 + "\r", nl=False, err=True)


def reading() -> contextlib.closing[Reading]:
    """Show the progress of a long read in a ``with`` block; see :class:`Reading`."""
    return contextlib.closing(Reading())


def screen() -> tuple[int, bool]:
    """Return the width of stdout in characters, and whether stdout is a terminal."""
    watched = sys.stdout.isatty()
    return (shutil.get_terminal_size().columns if watched else 80), watched
