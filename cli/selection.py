"""Options that select pending messages, shared by the commands of ``delaylevel pending``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from delaylevel.errors import InvalidInputError
from delaylevel.inspection import Inspector, Selection, Window
from delaylevel.topics.scan import DEFAULT_SLACK_MS
from delaylevel.web.reports import TOKEN_VARIABLE

from . import options
from .command import Settings
from .inspecting import Reading, inspector, note_delivery, reading, slack_option, target_option
from .output import note
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
    """Add the options that select messages, passed as the arguments of `query`."""
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


@contextlib.contextmanager
def query(
    settings: Settings,
    topic: str,
    *,
    target: str | None = None,
    slack_ms: int = DEFAULT_SLACK_MS,
    from_ms: int | None = None,
    before_ms: int | None = None,
    live: bool = True,
    live_token_file: Path | None = None,
    **conditions: Any,
) -> Iterator[tuple[Inspector, Selection, Reading]]:
    """Open an inspector for the values of the selection options, and show its progress."""
    if from_ms is not None and before_ms is not None and before_ms <= from_ms:
        raise InvalidInputError("--to is not after --from: nothing can be due in between")
    selection = Selection(Window(from_ms, before_ms), **conditions)
    token = None if live_token_file is None else live_token_file.read_text("utf-8").strip()
    chosen = {"target": target, "slack_ms": slack_ms, "live": live, "live_token": token}
    with inspector(settings, topic, **chosen) as look, reading() as shown:
        yield look, selection, shown
        refusals = {} if look.live is None else look.live.refusals
        for address, reason in refusals.items():
            where = f"the dispatcher at {address}" if address else "the dispatchers"
            note(f"The window was read from its topic; {where} did not answer: {reason}")
        note_delivery(look, topic)
