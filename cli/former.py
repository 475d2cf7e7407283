"""Former names of groups and commands. They still work, and no help shows them."""

from __future__ import annotations

import click

from .deploy import COMMANDS as FUNCTION_COMMANDS
from .dispatcher import run as run_dispatcher
from .dispatcher import status as dispatcher_status
from .mover import run as run_mover

sync = click.Group(
    "sync",
    commands={"spark": run_mover},
    hidden=True,
    help="Former name of `delaylevel mover`.",
)
function = click.Group(
    "function",
    commands={command.name or "": command for command in FUNCTION_COMMANDS},
    hidden=True,
    help="Former name of `delaylevel mover`, for the Function.",
)
dispatch = click.Group(
    "dispatch",
    commands={"run": run_dispatcher, "status": dispatcher_status},
    hidden=True,
    help="Former name of `delaylevel dispatcher`.",
)
