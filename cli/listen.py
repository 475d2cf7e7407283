"""``delaylevel listen``: the listeners of an application as a program."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import click

from delaylevel.cli.views.output import note
from delaylevel.cluster.threads import stop_on_signals

from . import options
from .command import Settings, examples, pass_settings
from .service import serve_metrics

if TYPE_CHECKING:
    from delaylevel.consumer import Listeners


@examples(
    "delaylevel listen shop.billing:app",
    "delaylevel listen shop.billing:app --metrics-port 9110",
)
@click.command()
@click.argument("target", metavar="MODULE:NAME")
@options.metrics
@pass_settings
def listen(settings: Settings, target: str, metrics_port: int | None, metrics_address: str) -> None:
    """Run the listeners of an application.

    MODULE is searched in the current folder first. NAME is that of a Listeners in it.

    Listeners.from_config() takes the address of the cluster from the options of this command, from
    the environment and from the configuration file. Listeners with a client of their own ignore
    these.

    SIGTERM or Ctrl-C ends it when the running handlers have finished.
    """
    from delaylevel.consumer.listeners import load

    _pass_on(settings)
    app = load(target)
    for name in app.unused_settings():
        note(f"{name} has no effect: there is no listener with this name.")
    # For the time before the listeners have handlers of their own.
    stop_on_signals(app.stop)
    with contextlib.ExitStack() as stack:
        if metrics_port is not None:
            from delaylevel.consumer.metrics import ListenerCollector

            serve_metrics(stack, ListenerCollector(app), metrics_port, metrics_address)
        _tell(app)
        app.run()


def _tell(app: Listeners) -> None:
    for listener in app.listeners:
        kind = listener.subscription_type.name
        note(f"{listener.name}: {listener.topic}, subscription {listener.subscription} ({kind})")
    note("Ctrl-C ends it.")


def _pass_on(settings: Settings) -> None:
    """Put the options for the connection into the environment, where `from_config` finds them."""
    flags = settings.flags
    if {"token", "token_file"} & flags.keys():
        for name in ("DELAYLEVEL_TOKEN", "DELAYLEVEL_TOKEN_FILE"):
            os.environ.pop(name, None)
    for name, value in flags.items():
        variable = "CONFIG" if name == "config_file" else name.upper()
        os.environ[f"DELAYLEVEL_{variable}"] = str(value)
