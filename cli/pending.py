"""``delaylevel pending``: pending messages as rows, or the average of an attribute."""

from __future__ import annotations

import base64
import difflib
import functools
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from delaylevel.cli.views.output import emit, emit_one, note
from delaylevel.cli.views.tables import Column
from delaylevel.cli.views.terminal import cut, printable
from delaylevel.model.formatting import format_duration

from . import cancellation, options
from .command import Settings, examples, pass_settings
from .inspection import query, selection_options

if TYPE_CHECKING:
    from delaylevel.inspection.rows import PendingRow


# The longest key and payload that leave room for the other columns of an 80-character table.
_KEY_WIDTH = 24
_PAYLOAD_WIDTH = 40


def row_view(row: PendingRow, payload: bool) -> dict[str, Any]:
    """Return a pending message as one row; the payload is its ``value_base64``."""
    view = row._asdict()
    value = view.pop("value")
    view["position"] = f"{view.pop('ledger')}:{view.pop('entry')}:{view.pop('batch')}"
    if payload:
        view["value_base64"] = None if value is None else base64.b64encode(value).decode()
    return view


def table_view(view: dict[str, Any], wide: bool) -> dict[str, Any]:
    """Return the row of :func:`row_view` for a table: short texts, and properties in one cell."""
    key = view["key"]
    return {
        **view,
        "key": key if wide or key is None else cut(printable(key), _KEY_WIDTH),
        "payload": _payload_text(view.get("value_base64")),
        "application": ", ".join(
            f"{name}={value}"
            for name, value in view["properties"].items()
            if not name.startswith("delaylevel.")
        ),
    }


def _payload_text(value_base64: str | None) -> str | None:
    if value_base64 is None:
        return None
    text = base64.b64decode(value_base64).decode(errors="replace")
    return cut(printable(text[: 4 * _PAYLOAD_WIDTH]), _PAYLOAD_WIDTH)


_ROWS: tuple[Column, ...] = (
    Column("due_ms", "time"),
    Column("key"),
    Column("size", "number"),
    Column("place", head="WAITS IN"),
    Column("target", "topic", wide=True, head="FOR"),
    Column("publish_ms", "time", wide=True, head="PUBLISHED"),
    Column("application", wide=True, head="PROPERTIES"),
    Column("id", "id", wide=True),
)
_AVERAGE = (
    Column("attribute"),
    Column("mean", "number"),
    Column("least", "number"),
    Column("most", "number"),
    Column("total", "number"),
    Column("counted", "number"),
    Column("messages", "number"),
)


class _Group(click.Group):
    """A group in which ``delaylevel pending TOPIC`` means ``delaylevel pending list TOPIC``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``list`` if the first word is not a command."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            near = difflib.get_close_matches(args[0], self.commands, 1)
            if near and args[1:2] and not args[1].startswith("-"):
                # A topic has no second argument.
                ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
            args = ["list", *args]
        return super().parse_args(ctx, args)


_limit_option = functools.partial(
    click.option, "--limit", type=click.IntRange(min=0), help="Number of rows to show; 0 for all."
)
_payload_option = click.option(
    "--payload", is_flag=True, help="Include the payload; base64 in JSON."
)


@examples(
    "delaylevel pending orders --from +1h --to +2h",
    "delaylevel pending list orders --where 'size > 1000' --limit 20",
    "delaylevel pending list orders --key customer-7",
    "delaylevel pending average orders size --to +1d",
    "delaylevel pending cancel orders --key customer-7 --count 3",
)
@click.group(cls=_Group)
def pending() -> None:
    """Inspect pending messages, and cancel or reschedule them.

    They wait in levels, in the final window, or are held. `delaylevel pending TOPIC` is short for
    `delaylevel pending list TOPIC`. Queries acknowledge, move and lock nothing, and movers may run
    at the same time. Cancelled messages are not pending.
    """


@examples(
    "delaylevel pending list orders",
    "delaylevel pending list orders --from +1h --to +2h --limit 20",
    "delaylevel pending list orders --where 'size > 1000 AND delay_ms > 86400000'",
    "delaylevel pending list orders --where \"properties['kind'] = 'reminder'\" -o wide",
    "delaylevel pending list orders --key customer-7 --limit 0 -o jsonl --payload > saved.jsonl",
    "delaylevel pending list orders --property invoice=2030-117",
    "delaylevel pending list orders --id public/default/_orders-delay-level-partition-3:12:7:0",
)
@pending.command("list")
@click.argument("topic")
@selection_options
@_limit_option(default=100)
@_payload_option
@options.output
@pass_settings
def list_(
    settings: Settings, topic: str, limit: int, payload: bool, output: str, **conditions: Any
) -> None:
    """List pending messages of TOPIC in due order.

    Only messages that are due between --from and --to are read. --where is SQL on these columns:
    due_ms, publish_ms, delay_ms, event_ms, size, key, ordering_key, id, target, place, role, level,
    partition, properties['name'], value.

    With --id, the exit code is 1 if no pending message matches. With --payload, `delaylevel send
    --jsonl` sends the rows of -o jsonl again, with their IDs, targets and due times.
    """
    with query(settings, topic, **conditions) as (look, selection, shown):
        # One more than the limit shows that there are more.
        found = look.rows(selection, limit=limit + 1 if limit else None, value=payload)
        views = (row_view(row, payload) for row in found)
        if output == "jsonl":
            count = _print_lines(views, limit, shown.close)
        else:
            rows = list(views)
            count = len(rows)
            shown.close()
            _print_rows(rows[: limit or None], output, payload)
    if limit and count > limit:
        note(f"There are more than {limit:,}; --limit 0 shows all.")
    if conditions["id"] is not None and not count:
        click.get_current_context().exit(1)


def _print_rows(rows: list[dict[str, Any]], output: str, payload: bool) -> None:
    columns = _ROWS
    if output in ("table", "wide"):
        rows = [table_view(row, wide=output == "wide") for row in rows]
        if payload:
            columns = (*_ROWS, Column("payload"))
    emit(rows, columns, output, empty="No pending message matches.")


def _print_lines(rows: Iterable[dict[str, Any]], limit: int, before: Callable[[], None]) -> int:
    """Print rows while they are read, and return their number: at most one above the limit."""
    number = 0
    for number, row in enumerate(rows, 1):
        if number == 1:
            before()
        if limit and number > limit:
            break
        click.echo(json.dumps(row))
    return number


@examples(
    "delaylevel pending average orders size",
    "delaylevel pending average orders delay --from +1h --to +2h",
    "delaylevel pending average orders amount --where \"properties['kind'] = 'invoice'\"",
)
@pending.command()
@click.argument("topic")
@click.argument("attribute")
@selection_options
@options.output
@pass_settings
def average(settings: Settings, topic: str, attribute: str, output: str, **conditions: Any) -> None:
    """Show the mean of an attribute of pending messages.

    ATTRIBUTE is size (bytes), delay (ms from publishing until due), or a numeric property.
    MESSAGES counts all messages, COUNTED those that have a number.
    """
    with query(settings, topic, **conditions) as (look, selection, _):
        found = look.average(attribute, selection)
    view = vars(found)
    if output in ("table", "wide") and attribute == "delay":
        view = {
            name: format_duration(value) if isinstance(value, float) else value
            for name, value in view.items()
        }
    emit_one(view, _AVERAGE, output)


for _command in cancellation.COMMANDS:
    pending.add_command(_command)
