"""Parts of the commands on pending messages: the inspector, progress, and the selection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from delaylevel.cli.views.levels import note_undelivered
from delaylevel.cli.views.output import Progress, note
from delaylevel.errors import InvalidInputError
from delaylevel.inspection import Inspector, Selection, Window
from delaylevel.model.formatting import exact_duration
from delaylevel.topics.scan import DEFAULT_SLACK_MS
from delaylevel.web.reports import TOKEN_VARIABLE

from . import options
from .options import DURATION_MS, TIME, Settings, together


def inspector(settings: Settings, topic: str, **options: Any) -> Inspector:
    """Open an `Inspector` of the configured cluster, which shows its progress."""
    client_options = {"logger": settings.client_logger()}
    options |= {"client_options": client_options, "tell": Progress().update}
    return Inspector.connect(settings.reachable(), topic, **options)


id_option = click.option("--id", metavar="ID", help="Stable ID (delaylevel.id) to match.")
#: The options that select messages, passed as the arguments of `query`.
selection_options = together(
    click.option(
        "--from", "from_ms", type=TIME, help="Earliest due time: ISO-8601, epoch ms or +2h."
    ),
    click.option(
        "--to",
        "before_ms",
        type=TIME,
        help="End of the due times, excluded: ISO-8601, epoch ms or +2h.",
    ),
    click.option("--where", metavar="SQL", help="Condition on the columns: 'size > 1000'."),
    id_option,
    click.option("--key", metavar="KEY", help="Partition key to match."),
    options.pairs("--property", "properties", help="Property to match. Repeatable."),
    options.target,
    click.option(
        "--slack",
        "slack_ms",
        type=DURATION_MS,
        default=exact_duration(DEFAULT_SLACK_MS),
        help="Longest outage or clock difference that a search by due time allows for.",
    ),
    click.option(
        "--live-token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"File with the token of live queries; by default the token in {TOKEN_VARIABLE}.",
    ),
    click.option(
        "--live/--no-live",
        default=True,
        show_default=False,
        help="Ask running dispatchers about the window (default), or read its topic.",
    ),
)


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
) -> Iterator[tuple[Inspector, Selection]]:
    """Open an inspector for the values of the selection options."""
    if from_ms is not None and before_ms is not None and before_ms <= from_ms:
        raise InvalidInputError("--to is not after --from: nothing can be due in between")
    selection = Selection(Window(from_ms, before_ms), **conditions)
    token = None if live_token_file is None else live_token_file.read_text("utf-8").strip()
    chosen = {"target": target, "slack_ms": slack_ms, "live": live, "live_token": token}
    with inspector(settings, topic, **chosen) as look:
        yield look, selection
        refusals = {} if look.live is None else look.live.refusals
        for address, reason in refusals.items():
            where = f"the dispatcher at {address}" if address else "the dispatchers"
            note(f"The window was read from its topic; {where} did not answer: {reason}")
        note_undelivered(look.admin, look.description, topic)
