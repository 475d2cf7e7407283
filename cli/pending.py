"""``delaylevel pending``: pending messages as rows or an average; cancel or reschedule them."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from delaylevel import changes
from delaylevel.cli.views.levels import note_undelivered
from delaylevel.cli.views.output import emit, emit_one, finish, note
from delaylevel.cli.views.tables import Column, Kind
from delaylevel.errors import InvalidInputError, StillPendingError
from delaylevel.inspection import Inspector, Selection, Window
from delaylevel.model.clock import duration_ms
from delaylevel.model.formatting import exact_duration
from delaylevel.model.outcome import Receipt
from delaylevel.producer.receipts import check_cancellable
from delaylevel.topics.scan import DEFAULT_SLACK_MS

from . import options
from .options import DURATION, DURATION_MS, TIME, Group, Settings, together

if TYPE_CHECKING:
    from delaylevel.inspection.rows import PendingRow

# Bytes of a payload in a table: one of several MB would fill a pipe.
_PAYLOAD_BYTES = 160


def row_view(row: PendingRow, payload: bool, output: str) -> dict[str, Any]:
    """Return a pending message as one row; its payload is text in a table, and base64 in JSON."""
    view = row._asdict()
    value: bytes | None = view.pop("value")
    view["position"] = f"{view.pop('ledger')}:{view.pop('entry')}:{view.pop('batch')}"
    if output == "table":
        text = None if value is None else value[:_PAYLOAD_BYTES].decode(errors="replace")
        view["payload"] = text
    elif payload:
        view["value_base64"] = None if value is None else base64.b64encode(value).decode()
    return view


_ROWS: tuple[Column, ...] = (
    Column("due_ms", "time"),
    Column("key"),
    Column("size", "number"),
    Column("place", head="WAITS IN"),
    Column("id", "id", rank=1),
)


class _Group(Group):
    """A group in which ``delaylevel pending TOPIC`` means ``delaylevel pending list TOPIC``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``list`` before options, or before a topic that no other word follows."""
        other = args and args[0] not in (*self.commands, "-h", "--help")
        if other and (not args[1:] or any(word.startswith("-") for word in args[:2])):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Group)
def pending() -> None:
    """Inspect pending messages, and cancel or reschedule them.

    They wait in levels, in the final window, or are held. `delaylevel pending TOPIC` is short for
    `delaylevel pending list TOPIC`. Queries acknowledge, move and lock nothing, and movers may run
    at the same time. Cancelled messages are not pending.
    """


_id = click.option("--id", metavar="ID", help="Stable ID (delaylevel.id) to match.")
#: The options that select messages; `_query` takes their values.
_selection = together(
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
    _id,
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
        "--live/--no-live",
        default=True,
        show_default=False,
        help="Ask running dispatchers about the window (default), or read its topic.",
    ),
)


@contextlib.contextmanager
def _query(
    settings: Settings,
    topic: str,
    *,
    target: str | None = None,
    slack_ms: int = DEFAULT_SLACK_MS,
    from_ms: int | None = None,
    before_ms: int | None = None,
    live: bool = True,
    **conditions: Any,
) -> Iterator[tuple[Inspector, Selection]]:
    """Open an inspector for the values of the selection options."""
    if from_ms is not None and before_ms is not None and before_ms <= from_ms:
        raise InvalidInputError("--to is not after --from: nothing can be due in between")
    selection = Selection(Window(from_ms, before_ms), **conditions)
    with settings.inspector(topic, target=target, slack_ms=slack_ms, live=live) as look:
        yield look, selection
        # Notes follow the rows, so that the last lines on a terminal say what to do.
        refusals = {} if look.live is None else look.live.refusals
        for address, reason in refusals.items():
            where = f"the dispatcher at {address}" if address else "the dispatchers"
            note(f"The window was read from its topic; {where} did not answer: {reason}")
        note_undelivered(look.admin, look.description, topic)


@options.topic_command(
    pending,
    "delaylevel pending list orders",
    "delaylevel pending list orders --from +1h --to +2h --limit 20",
    "delaylevel pending list orders --where \"properties['kind'] = 'a'\" -o json",
    "delaylevel pending list orders --limit 0 -o jsonl --payload > saved.jsonl",
    "delaylevel pending list orders --key customer-7",
    name="list",
)
@_selection
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    help="Number of rows to show; 0 for all.",
)
@click.option("--payload", is_flag=True, help="Include the payload; base64 in JSON.")
def list_(
    settings: Settings, topic: str, limit: int, payload: bool, output: str, **conditions: Any
) -> None:
    """List pending messages of TOPIC in due order.

    --from and --to also limit the range that is read. --where is SQL on these columns:
    due_ms, publish_ms, delay_ms, event_ms, size, key, ordering_key, id, target, place, role, level,
    partition, properties['name'], value.

    With --id, the exit code is 1 if no pending message matches. With --payload, `delaylevel send
    --jsonl` sends the rows of -o jsonl again, with their IDs, targets and due times.
    """
    with _query(settings, topic, **conditions) as (look, selection):
        # One more than the limit shows that there are more.
        found = look.rows(selection, limit=limit + 1 if limit else None, value=payload)
        count = 0

        def shown() -> Iterator[dict[str, Any]]:
            nonlocal count
            for count, row in enumerate(found, 1):
                if limit and count > limit:
                    break
                yield row_view(row, payload, output)

        columns = (*_ROWS, Column("payload")) if payload else _ROWS
        emit(shown(), columns, output, empty="No pending message matches.")
    if limit and count > limit:
        note(f"There are more than {limit:,}; --limit 0 shows all.")
    if conditions["id"] is not None and not count:
        click.get_current_context().exit(1)


@options.topic_command(
    pending,
    "delaylevel pending average orders size",
    "delaylevel pending average orders delay --from +1h --to +2h",
)
@click.argument("attribute")
@_selection
def average(settings: Settings, topic: str, attribute: str, output: str, **conditions: Any) -> None:
    """Show the mean of an attribute of pending messages.

    ATTRIBUTE is size (bytes), delay (ms from publishing until due), or a numeric property.
    MESSAGES counts all messages, COUNTED those that have a number.
    """
    with _query(settings, topic, **conditions) as (look, selection):
        found = look.average(attribute, selection)
    kind: Kind = "duration" if attribute == "delay" else "number"
    columns = (
        Column("attribute"),
        *(Column(name, kind) for name in ("mean", "least", "most", "total")),
        *(Column(name, "number") for name in ("counted", "messages")),
    )
    emit_one(vars(found), columns, output)


_OUTCOMES: tuple[Column, ...] = (
    Column("id", "id"),
    Column("outcome"),
    Column("due_ms", "time", rank=1),
    Column("released_ms", "time", rank=2),
    Column("reason", rank=3),
)
_RESCHEDULED = (*_OUTCOMES, Column("new_id", head="NEW ID"), Column("new_due_ms", "time", rank=1))

_changing = together(
    click.option("--receipt", metavar="TEXT", help="Receipt of the message, instead of its ID."),
    _selection,
    options.count(),
    click.option(
        "--timeout",
        type=DURATION,
        help="Time to wait for outcomes; by default they are not waited for.",
    ),
)


@options.topic_command(
    pending,
    "delaylevel pending cancel orders --id renewal-4711",
    "delaylevel pending cancel orders --key customer-7 --count 3 --timeout 1s",
    "delaylevel pending cancel orders --where \"properties['a'] = 'b'\" --count 9",
)
@_changing
def cancel(settings: Settings, topic: str, **arguments: Any) -> None:
    """Cancel pending messages of TOPIC.

    Select them as for `delaylevel pending list`, or one by its receipt, which needs no search. More
    than one message needs --count.

    OUTCOME is `accepted` until the dispatcher has decided, which it does when the message is nearly
    due. There is a row for each message that does not wait in the held topic, where nothing can
    be cancelled. The exit code is 0 if all selected messages are accepted or cancelled, and 1 if
    one of them is held, failed, too late or unknown, or none is found.
    """
    _change(settings, topic, changes.cancel, _OUTCOMES, **arguments)


@options.topic_command(
    pending,
    "delaylevel pending reschedule orders --id renewal-4711 --at +2d",
    "delaylevel pending reschedule orders --id a --at 2030-01-31T12:00:00Z",
)
@_changing
@options.at("deliver_at", required=True)
def reschedule(settings: Settings, topic: str, deliver_at: int, **arguments: Any) -> None:
    """Give pending messages of TOPIC another due time.

    Each message is stored again, with a new ID and the new due time. Then the old one is cancelled,
    and OUTCOME is that of its cancellation. At least one of the two is delivered, and if OUTCOME is
    `too late`, both are. Messages are selected as for `delaylevel pending cancel`.

    There is a row for each message. One that could not be stored again is `failed` with the reason,
    and stays as it is; `both` if it was stored again, but the old one could not be cancelled;
    `unconfirmed` if nobody knows. The exit code is 0 if all of them are accepted or cancelled, and
    otherwise 1, even if none is found.
    """
    change = partial(changes.reschedule, deliver_at=deliver_at)
    _change(settings, topic, change, _RESCHEDULED, **arguments)


@options.topic_command(
    pending,
    "delaylevel pending fire orders --id renewal-4711",
    "delaylevel pending fire orders --key customer-7 --count 3 --timeout 1s",
)
@_changing
def fire(settings: Settings, topic: str, **arguments: Any) -> None:
    """Deliver pending messages of TOPIC now.

    This is `delaylevel pending reschedule` to the present, with the same outcomes and exit codes.
    """
    _change(settings, topic, changes.fire, _RESCHEDULED, **arguments)


@options.topic_command(
    pending,
    "delaylevel pending outcome orders",
    "delaylevel pending outcome orders --id renewal-4711 -o json",
)
@_id
def outcome(settings: Settings, topic: str, id: str | None, output: str) -> None:  # noqa: A002
    """Show the outcomes of cancellations of TOPIC.

    Those of about the last day are shown, one for each message. With --id, the exit code is 1 if
    there is none: the dispatcher has not decided, or it was long ago.
    """
    with settings.inspector(topic) as look:
        found = look.outcomes().stored(id)
    emit(
        [changes.outcome_view(one) for one in found],
        _OUTCOMES,
        output,
        empty="No cancellation has an outcome.",
    )
    if id is not None and not found:
        click.get_current_context().exit(1)


def _change(
    settings: Settings,
    topic: str,
    change: changes.Change,
    columns: Sequence[Column],
    *,
    receipt: str | None,
    count: int | None,
    timeout: Any,
    output: str,
    **conditions: Any,
) -> None:
    """Change the selected messages, and print the outcomes."""
    with _query(settings, topic, **conditions) as (look, selection):
        check_cancellable(look.description, has_admin=True)
        chosen, held = _selected(look, selection, receipt)
        if len(chosen) != count and (count is not None or len(chosen) > 1):
            raise StillPendingError(
                f"{len(chosen)} messages are selected: confirm with --count {len(chosen)}; nothing "
                "was changed",
                len(chosen),
            )
        results = []
        if chosen:
            timeout_s = None if timeout is None else duration_ms(timeout) / 1000
            results = changes.change_messages(
                settings.producer_client, look, chosen, change, timeout_s, note
            )
        # Nothing that can fail stands between the changes and their rows.
        finish(
            [(one.view, one.done) for one in results],
            columns,
            output,
            others=held,
            empty="No message matches.",
        )


def _selected(
    look: Inspector, selection: Selection, receipt: str | None
) -> tuple[list[Receipt], int]:
    """Return the receipts of the selected messages, and the number of those that are held."""
    if receipt is not None:
        if selection != Selection():
            raise click.UsageError("a receipt names one message: give no further conditions")
        return [changes.named_by_receipt(look.description, receipt)], 0
    if selection == Selection() and look.target is None:
        raise click.UsageError("select messages: --id, --receipt, --key, --where, --from, --to …")
    rows = changes.pending_rows(look, selection)
    found, held = changes.receipts_of(look.description, rows)
    if held:
        note(f"{held:,} selected messages are held or unreadable: they cannot be cancelled.")
    return found, held
