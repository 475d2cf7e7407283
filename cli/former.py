"""Former names of groups and commands. They still work, and no help shows them."""

from __future__ import annotations

import click

from . import deploy
from .dispatcher import dispatcher
from .mover import run

sync = click.Group("sync", {"spark": run}, hidden=True, help="Former name of `delaylevel mover`.")
function = click.Group(
    "function",
    deploy.COMMANDS,
    hidden=True,
    help="Former name of `delaylevel mover`, for the Function.",
)
dispatch = click.Group(
    "dispatch",
    dispatcher.commands,
    hidden=True,
    help="Former name of `delaylevel dispatcher`.",
)
