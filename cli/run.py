"""``delaylevel run``: mover and dispatcher in one service, without Spark."""

from __future__ import annotations

from typing import Any

import click

from delaylevel.errors import ConfigError

from . import options
from .options import Settings, examples, pass_settings
from .service import serve


@examples(
    "delaylevel run orders",
    "delaylevel run orders invoices --metrics-port 9109",
    "delaylevel run --namespace public/default",
)
@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@options.namespace_option()
@options.trigger
@options.dispatching
@options.metrics
@pass_settings
def run(settings: Settings, topics: tuple[str, ...], namespace: str | None, **fields: Any) -> None:
    """Move and release the messages of level topics.

    This is the mover and the dispatcher in one service, without Spark and Java. TOPIC is a business
    topic or a level topic. --namespace serves all level topics, also those created later.

    Start the command twice, on one machine or two: the second process is on standby for the mover,
    takes half of the dispatcher's work, and takes over from the first one.

    SIGTERM or Ctrl-C ends it when the messages in flight are published.
    """
    if bool(topics) == (namespace is not None):
        raise ConfigError("give topics, or --namespace to serve all level topics of a namespace")
    serve(settings, topics, namespace=namespace, **fields)
