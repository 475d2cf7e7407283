"""``delaylevel dispatcher``: the service that releases due messages from the final window."""

from __future__ import annotations

from typing import Any

import click

from . import options
from .options import Group, Settings, examples, pass_settings
from .run import serve


@click.group(cls=Group)
def dispatcher() -> None:
    """Release due messages from the final window.

    `delaylevel levels describe` shows who owns its partitions.
    """


@examples(
    "delaylevel dispatcher run orders",
    "delaylevel dispatcher run orders invoices --metrics-port 9109",
    "delaylevel dispatcher run orders --delivery effectively-once --memory 1024",
)
@dispatcher.command()
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@options.dispatching
@options.metrics
@pass_settings
def run(settings: Settings, topics: tuple[str, ...], **fields: Any) -> None:
    """Run a dispatcher for level topics.

    TOPIC is a business topic or a level topic with the final window "tracker". Any number of
    dispatchers may run, on one machine or many: they share the window's partitions, and take over
    those of a dispatcher that dies or hangs. Spill files are in your state folder unless
    --spill-dir names another. SIGTERM or Ctrl-C ends it when the current batches are published.
    """
    serve(settings, topics, moves=False, **fields)
