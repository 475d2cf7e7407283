"""``delaylevel pending cancel|reschedule|fire|outcome``: changes to pending messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import click

from delaylevel import changes
from delaylevel.changes import (
    Change,
    change_messages,
    named_by_receipt,
    outcome_view,
    pending_rows,
    receipts_of,
)
from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.tables import Column
from delaylevel.cluster.connection.settings import require_reachable
from delaylevel.errors import InvalidInputError, StillPendingError
from delaylevel.inspection import Inspector, Selection
from delaylevel.model.clock import duration_ms
from delaylevel.model.outcome import Receipt
from delaylevel.producer.client import DelayLevelClient
from delaylevel.producer.receipts import check_cancellable

from . import options
from .command import Settings, examples, pass_settings
from .failures import finish, outcome_tone
from .inspection import id_option, inspector, query, selection_options
from .options import DURATION

OUTCOMES: tuple[Column, ...] = (
    Column("id", "id"),
    Column("outcome", tone=outcome_tone),
    Column("due_ms", "time", rank=1),
    Column("released_ms", "time", rank=2),
    Column("reason", rank=3),
    Column("target", "topic", wide=True, head="FOR"),
    Column("key", wide=True),
    Column("decided_ms", "time", wide=True),
)
RESCHEDULED = (*OUTCOMES, Column("new_id", head="NEW ID"), Column("new_due_ms", "time", rank=1))

F = TypeVar("F", bound=Callable[..., Any])


def _changing(function: F) -> F:
    """Add the options that select messages to change, and those of their outcomes."""
    for option in (
        options.output,
        click.option(
            "--timeout",
            type=DURATION,
            help="Time to wait for outcomes; by default they are not waited for.",
        ),
        click.option(
            "--count",
            type=click.IntRange(min=0),
            help="Number of selected messages, as a confirmation.",
        ),
        selection_options,
        click.option(
            "--receipt", metavar="TEXT", help="Receipt of the message, instead of its ID."
        ),
        click.argument("topic"),
    ):
        function = option(function)
    return function


@examples(
    "delaylevel pending cancel orders --id renewal-4711",
    "delaylevel pending cancel orders --key customer-7 --count 3 --timeout 1s",
    "delaylevel pending cancel orders --where \"properties['kind'] = 'reminder'\" --count 120",
)
@click.command()
@_changing
@pass_settings
def cancel(settings: Settings, topic: str, **arguments: Any) -> None:
    """Cancel pending messages of TOPIC.

    Select them as for `delaylevel pending list`, or one by its receipt, which needs no search. More
    than one message needs --count.

    OUTCOME is `accepted` until the dispatcher has decided, which it does when the message is nearly
    due. There is a row for each message. The exit code is 0 if all of them are accepted or
    cancelled, and 1 if one of them is failed, too late or unknown, or none is found.
    """
    _change(settings, topic, changes.cancel, OUTCOMES, **arguments)


@examples(
    "delaylevel pending reschedule orders --id renewal-4711 --at +2d",
    "delaylevel pending reschedule orders --key customer-7 --count 3 --at 2030-01-31T12:00:00Z",
)
@click.command()
@_changing
@options.at("deliver_at", required=True)
@pass_settings
def reschedule(settings: Settings, topic: str, deliver_at: int, **arguments: Any) -> None:
    """Give pending messages of TOPIC another due time.

    Each message is stored again, with a new ID and the new due time. Then the old one is cancelled,
    and OUTCOME is that of its cancellation. At least one of the two is delivered, and if OUTCOME is
    `too late`, both are. Messages are selected as for `delaylevel pending cancel`.

    There is a row for each message. One that could not be stored again is `failed` with the reason,
    and stays as it is; `both` if it was stored again, but the old one could not be cancelled;
    `unconfirmed` if nobody knows. The exit code is 0 if all of them are accepted or cancelled, and
    otherwise 1, also if none is found.
    """
    change = partial(changes.reschedule, deliver_at)
    _change(settings, topic, change, RESCHEDULED, **arguments)


@examples(
    "delaylevel pending fire orders --id renewal-4711",
    "delaylevel pending fire orders --key customer-7 --count 3 --timeout 1s",
)
@click.command()
@_changing
@pass_settings
def fire(settings: Settings, topic: str, **arguments: Any) -> None:
    """Deliver pending messages of TOPIC now.

    This is `delaylevel pending reschedule` to the present, with the same outcomes and exit codes.
    """
    _change(settings, topic, changes.fire, RESCHEDULED, **arguments)


@examples(
    "delaylevel pending outcome orders",
    "delaylevel pending outcome orders --id renewal-4711 -o json",
)
@click.command()
@click.argument("topic")
@id_option
@options.output
@pass_settings
def outcome(settings: Settings, topic: str, id: str | None, output: str) -> None:  # noqa: A002
    """Show the outcomes of cancellations of TOPIC.

    Those of about the last day are shown, one for each message. With --id, the exit code is 1 if
    there is none: the dispatcher has not decided, or it was long ago.
    """
    with inspector(settings, topic) as look:
        found = look.outcomes().stored(id)
    emit(
        [outcome_view(one) for one in found],
        OUTCOMES,
        output,
        empty="No cancellation has an outcome.",
    )
    if id is not None and not found:
        click.get_current_context().exit(1)


COMMANDS = (cancel, reschedule, fire, outcome)


def client_of(settings: Settings) -> DelayLevelClient:
    """Open a client for the producers that send cancellations."""
    connection = settings.connection()
    require_reachable(connection)
    return DelayLevelClient.from_connection(connection, logger=settings.client_logger())


def _change(
    settings: Settings,
    topic: str,
    change: Change,
    columns: Sequence[Column],
    *,
    receipt: str | None,
    count: int | None,
    timeout: Any,
    output: str,
    **conditions: Any,
) -> None:
    """Change the selected messages, and print the outcomes."""
    with query(settings, topic, **conditions) as (look, selection, shown):
        check_cancellable(look.description, has_admin=True)
        if receipt is not None:
            if selection != Selection():
                raise click.UsageError("a receipt names one message: give no further conditions")
            chosen = [named_by_receipt(look.description, receipt)]
        else:
            chosen = _found(look, selection)
        shown.close()
        _confirm(chosen, count)
        results = []
        if chosen:
            timeout_s = None if timeout is None else duration_ms(timeout) / 1000
            opened = partial(client_of, settings)
            results = change_messages(opened, look, chosen, change, timeout_s, note)
        # Nothing that can fail stands between the changes and their rows.
        finish(
            [one.view for one in results],
            columns,
            output,
            done=sum(one.done for one in results),
            of=len(results),
            empty="No message matches.",
        )


def _found(look: Inspector, selection: Selection) -> list[Receipt]:
    """Return the receipts of the selected messages, without those that are held."""
    if selection == Selection() and look.target is None:
        raise click.UsageError("select messages: --id, --receipt, --key, --where, --from, --to …")
    rows = pending_rows(look, selection)
    found, held = receipts_of(look.description, rows)
    if held:
        note(f"{held:,} selected messages are held or unreadable: they cannot be cancelled.")
    return found


def _confirm(chosen: Sequence[Receipt], count: int | None) -> None:
    """Raise an error unless the number of messages is confirmed."""
    if count is None and len(chosen) > 1:
        raise InvalidInputError(
            f"{len(chosen)} messages are selected: confirm with --count {len(chosen)}; nothing was "
            "changed"
        )
    if count is not None and count != len(chosen):
        raise StillPendingError(
            f"{len(chosen)} messages are selected, not {count}: nothing was changed", len(chosen)
        )
