"""Helpers of the commands that inspect pending messages: the inspector, progress, the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from delaylevel.cluster.connection import require_reachable
from delaylevel.model.formatting import exact_duration
from delaylevel.topics.scan import DEFAULT_SLACK_MS

from .command import Settings
from .delivery import note_undelivered
from .live import ProgressLine, live_region
from .terminal import width_of
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

    _LEAST = 20_000

    def __init__(self) -> None:
        self._drawing = contextlib.ExitStack()
        self._region = self._drawing.enter_context(live_region())
        self._progress = ProgressLine(self._region, "Read", None)

    def expect(self, messages: int) -> None:
        """Set the estimated number of messages that follow."""
        known = messages if messages >= self._LEAST else None
        self._progress = ProgressLine(self._region, "Reading" if known else "Read", known)

    def tell(self, messages: int) -> None:
        """Add a number of messages that were read."""
        self._progress.update(messages)

    def close(self) -> None:
        """Close the region and erase the line."""
        self._drawing.close()


def reading() -> contextlib.closing[Reading]:
    """Show the progress of a long read in a ``with`` block; see :class:`Reading`."""
    return contextlib.closing(Reading())


def screen() -> tuple[int, bool]:
    """Return the width of stdout in characters, and whether stdout is a terminal."""
    width = width_of(sys.stdout)
    return width or 80, width is not None
