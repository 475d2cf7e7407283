"""Options that select pending messages, shared by the commands of ``delaylevel pending``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from delaylevel.web.reports import TOKEN_VARIABLE

from . import options
from .inspecting import slack_option, target_option
from .values import TIME

F = TypeVar("F", bound=Callable[..., Any])

key_option = click.option("--key", metavar="KEY", help="Partition key to match.")
property_option = options.pairs("--property", "properties", help="Property to match. Repeatable.")
id_option = click.option("--id", metavar="ID", help="Stable ID (delaylevel.id) to match.")
live_option = click.option(
    "--live/--no-live",
    default=True,
    show_default=False,
    help="Ask running dispatchers about the window (default), or read its topic.",
)
live_token_option = click.option(
    "--live-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the token of live queries; by default the token in {TOKEN_VARIABLE}.",
)


def selection_options(function: F) -> F:
    """Add the options that select messages, passed as the arguments of ``query`` in ``pending``."""
    for option in (
        live_option,
        live_token_option,
        slack_option,
        target_option,
        property_option,
        key_option,
        id_option,
        click.option("--where", metavar="SQL", help="Condition on the columns: 'size > 1000'."),
        click.option(
            "--to",
            "before_ms",
            type=TIME,
            help="End of the due times, excluded: ISO-8601, epoch ms or +2h.",
        ),
        click.option(
            "--from", "from_ms", type=TIME, help="Earliest due time: ISO-8601, epoch ms or +2h."
        ),
    ):
        function = option(function)
    return function
