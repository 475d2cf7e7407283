"""``delaylevel pending``: pending messages as rows, bars, averages, or a file."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from delaylevel.inspection import Selection
from delaylevel.model.formatting import format_duration

from . import cancelling, options
from .command import Settings, examples, pass_settings
from .export import check_file, export_rows
from .inspecting import screen
from .output import Column, emit, emit_one, note
from .selection import query, selection_options
from .views.pending import histogram_text, histogram_view, row_view, table_view

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
    "--payload", is_flag=True, help="Include the payload; base64 in JSON and CSV."
)


@examples(
    "delaylevel pending orders --from +1h --to +2h",
    "delaylevel pending list orders --where 'size > 1000' --limit 20",
    "delaylevel pending list orders --key customer-7",
    "delaylevel pending histogram orders --by day",
    "delaylevel pending average orders size --to +1d",
    "delaylevel pending export orders pending.parquet",
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
    "delaylevel pending list orders --key customer-7 --limit 0 -o jsonl",
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

    With --id, the exit code is 1 if no pending message matches.
    """
    with query(settings, topic, **conditions) as (look, selection, shown):
        reads: dict[str, Any] = {"value": payload, "tell": shown.tell, "expect": shown.expect}
        found: Iterable[Any]
        if selection.id is not None and selection == Selection(id=selection.id):
            # One read may find the message if its ID is the only condition.
            found = look.find(selection.id, **reads)
        else:
            # One more than the limit shows that there are more.
            found = look.rows(selection, limit=limit + 1 if limit else None, **reads)
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
    "delaylevel pending histogram orders --by day",
    "delaylevel pending histogram orders --by hour --to +1d",
    "delaylevel pending histogram orders --by customer --limit 10",
    "delaylevel pending histogram orders --by size -o json",
)
@pending.command()
@click.argument("topic")
@click.option(
    "--by",
    default="hour",
    metavar="ATTRIBUTE",
    help="Attribute to group by: hour, day (UTC), size, key, target, place, or a property's name.",
)
@selection_options
@_limit_option(default=20)
@options.output
@pass_settings
def histogram(
    settings: Settings, topic: str, by: str, limit: int, output: str, **conditions: Any
) -> None:
    """Count pending messages of TOPIC by an attribute.

    All hours, days and sizes are shown. For other attributes, --limit shows the values with the
    most messages.
    """
    with query(settings, topic, **conditions) as (look, selection, shown):
        bars = look.histogram(by, selection, tell=shown.tell, expect=shown.expect)
    more = 0
    if by not in ("hour", "day", "size"):
        bars = sorted(bars, key=lambda one: -one.messages)
        more = max(0, len(bars) - limit) if limit else 0
        bars = bars[: limit or None]
    if output in ("json", "jsonl"):
        emit([histogram_view(one, by) for one in bars], (), output)
    elif not bars:
        note("No pending message matches.")
    else:
        width, watched = screen()
        click.echo(histogram_text(bars, by, width, bars=watched or output == "wide"))
    if more:
        note(f"{more:,} more are not shown; --limit 0 shows all.")


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
    with query(settings, topic, **conditions) as (look, selection, shown):
        found = look.average(attribute, selection, tell=shown.tell, expect=shown.expect)
    view = vars(found)
    if output in ("table", "wide") and attribute == "delay":
        view = {
            name: format_duration(value) if isinstance(value, float) else value
            for name, value in view.items()
        }
    emit_one(view, _AVERAGE, output)


@examples(
    "delaylevel pending export orders orders.parquet",
    "delaylevel pending export orders next-day.csv --to +1d --force",
    "delaylevel pending export orders invoices.jsonl --property kind=invoice --payload",
)
@pending.command()
@click.argument("topic")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@selection_options
@_payload_option
@click.option("--force", is_flag=True, help="Replace an existing file.")
@pass_settings
def export(
    settings: Settings, topic: str, file: Path, payload: bool, force: bool, **conditions: Any
) -> None:
    """Write pending messages of TOPIC to FILE.

    They are written in due order. The ending of FILE selects the format: .parquet, .csv or .jsonl.
    A .jsonl file has the keys of `list -o jsonl`; with --payload, `delaylevel send --jsonl` sends
    its messages again, with their IDs, targets and due times. A .csv file has the keys as columns,
    and a .parquet file has the columns that --where takes. Messages are written while they are
    read, under a temporary name in the same folder. FILE appears when it is complete.
    """
    check_file(file, force)
    with query(settings, topic, **conditions) as (look, selection, shown):
        count = export_rows(look, selection, file, payload, force, shown)
    note(f"{count:,} messages are in {file}.")


for _command in cancelling.COMMANDS:
    pending.add_command(_command)
