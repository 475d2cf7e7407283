"""``delaylevel pending``: the messages that wait, as rows, bars, averages, or one by its id."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import click

from delaylevel.cli.views.pending import histogram_text, histogram_view, row_view, shortened
from delaylevel.errors import InvalidInputError
from delaylevel.inspection import Selection, Window

from .inspecting import inspector, reading, screen, slack_option, target_option
from .options import TIME, Settings, examples, output_option, pass_settings
from .output import Column, emit, emit_one, format_duration, note

F = TypeVar("F", bound=Callable[..., Any])

_ROWS: tuple[Column, ...] = (
    Column("due_ms", "time"),
    Column("key"),
    Column("size", "number"),
    Column("place", head="WAITS IN"),
    Column("target", wide=True, head="FOR"),
    Column("publish_ms", "time", wide=True, head="PUBLISHED"),
    Column("application", wide=True, head="PROPERTIES"),
    Column("id", wide=True),
)
# So much of a key leaves room for the other columns in 80.
_KEY = 24
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
    """``delaylevel pending TOPIC`` means ``delaylevel pending list TOPIC``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def _selecting(function: F) -> F:
    """Add the options that say which messages are meant, passed as those of `_selection`."""
    options = [
        click.option("--from", "from_ms", type=TIME, help="Due then or later: ISO, ms or +2h."),
        click.option("--to", "before_ms", type=TIME, help="Due before then: ISO, ms or +2h."),
        click.option("--where", metavar="SQL", help="A condition on the columns: 'size > 1000'."),
        click.option("--key", help="Only this partition key."),
        click.option(
            "--property", "properties", multiple=True, metavar="K=V", help="Only with this one."
        ),
        target_option,
        click.option(
            "--engine",
            type=click.Choice(["direct", "spark"]),
            default="direct",
            show_default=True,
            help="Who reads the level topics.",
        ),
        slack_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _selection(
    from_ms: int | None,
    before_ms: int | None,
    where: str | None,
    key: str | None,
    properties: tuple[str, ...],
) -> Selection:
    if from_ms is not None and before_ms is not None and before_ms <= from_ms:
        raise InvalidInputError("--to is not after --from: nothing can be due in between")
    return Selection(Window(from_ms, before_ms), where, key, _pairs(properties))


def _pairs(values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r} is not K=V", param_hint="--property")
        found[name] = value
    return found


@click.group(
    cls=_Group,
    epilog=examples(
        "delaylevel pending orders --from +1h --to +2h",
        "delaylevel pending list orders --where 'size > 1000' --limit 20",
        "delaylevel pending histogram orders --by day",
        "delaylevel pending average orders size --to +1d",
        "delaylevel pending find orders --key customer-7",
    ),
)
def pending() -> None:
    """Look at the messages that wait: in levels, in the final window, held.

    `delaylevel pending TOPIC` is short for `delaylevel pending list TOPIC`. Nothing is
    acknowledged, moved or locked, and movers may be at work.
    """


@pending.command(
    "list",
    epilog=examples(
        "delaylevel pending list orders",
        "delaylevel pending list orders --from +1h --to +2h --limit 20",
        "delaylevel pending list orders --where 'size > 1000 AND delay_ms > 86400000'",
        "delaylevel pending list orders --where \"properties['kind'] = 'reminder'\" -o wide",
        "delaylevel pending list orders --key customer-7 --limit 0 -o jsonl",
    ),
)
@click.argument("topic")
@_selecting
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="The most rows; 0 for all.",
)
@click.option("--payload", is_flag=True, help="With the payload, base64 in JSON.")
@output_option
@pass_settings
def list_(
    settings: Settings,
    topic: str,
    from_ms: int | None,
    before_ms: int | None,
    where: str | None,
    key: str | None,
    properties: tuple[str, ...],
    target: str | None,
    engine: str,
    slack: timedelta,
    limit: int,
    payload: bool,
    output: str,
) -> None:
    """List pending messages of TOPIC in the order in which they are due.

    --from and --to limit what is read at all. --where is SQL on these columns: due_ms, publish_ms,
    delay_ms, event_ms, size, key, ordering_key, id, target, place, role, level, partition,
    properties['name'], value.
    """
    chosen = _selection(from_ms, before_ms, where, key, properties)
    with inspector(settings, topic, target, slack) as look, reading() as shown:
        found = look.rows(
            chosen,
            # One more, to know whether there are more.
            limit=limit + 1 if limit else None,
            value=payload,
            engine=engine,
            tell=shown.tell,
            expect=shown.expect,
        )
        views = (row_view(row, payload) for row in found)
        if output == "jsonl":
            cut = _print_lines(views, limit, shown.close)
        else:
            rows = list(views)
            cut = bool(limit) and len(rows) > limit
            shown.close()
            _print_rows(rows[:limit] if limit else rows, output, payload)
    if cut:
        note(f"There are more than {limit:,}; --limit 0 shows all.")


@pending.command(
    epilog=examples(
        "delaylevel pending histogram orders --by day",
        "delaylevel pending histogram orders --by hour --to +1d",
        "delaylevel pending histogram orders --by customer --limit 10",
        "delaylevel pending histogram orders --by size -o json",
    )
)
@click.argument("topic")
@click.option(
    "--by",
    default="hour",
    show_default=True,
    metavar="WHAT",
    help="hour, day (UTC), size, key, target, place, or the name of a property.",
)
@_selecting
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Of keys and properties only so many, the largest; 0 for all.",
)
@output_option
@pass_settings
def histogram(
    settings: Settings,
    topic: str,
    by: str,
    from_ms: int | None,
    before_ms: int | None,
    where: str | None,
    key: str | None,
    properties: tuple[str, ...],
    target: str | None,
    engine: str,
    slack: timedelta,
    limit: int,
    output: str,
) -> None:
    """Count pending messages of TOPIC by hour, day, size, key or a property."""
    chosen = _selection(from_ms, before_ms, where, key, properties)
    with inspector(settings, topic, target, slack) as look, reading() as shown:
        bars = look.histogram(by, chosen, engine=engine, tell=shown.tell, expect=shown.expect)
    more = 0
    if by not in ("hour", "day", "size"):
        bars = sorted(bars, key=lambda one: -one.messages)
        if limit and len(bars) > limit:
            more = len(bars) - limit
            bars = bars[:limit]
    if output in ("json", "jsonl"):
        emit([histogram_view(one, by) for one in bars], (), output)
    elif not bars:
        note("No pending message matches.")
    else:
        width, watched = screen()
        click.echo(histogram_text(bars, by, width, bars=watched or output == "wide"))
    if more:
        note(f"{more:,} more are not shown; --limit 0 shows all.")


@pending.command(
    epilog=examples(
        "delaylevel pending average orders size",
        "delaylevel pending average orders delay --from +1h --to +2h",
        "delaylevel pending average orders amount --where \"properties['kind'] = 'invoice'\"",
    )
)
@click.argument("topic")
@click.argument("attribute")
@_selecting
@output_option
@pass_settings
def average(
    settings: Settings,
    topic: str,
    attribute: str,
    from_ms: int | None,
    before_ms: int | None,
    where: str | None,
    key: str | None,
    properties: tuple[str, ...],
    target: str | None,
    engine: str,
    slack: timedelta,
    output: str,
) -> None:
    """Show the mean of ATTRIBUTE over pending messages of TOPIC.

    ATTRIBUTE is size (bytes), delay (ms from publishing until due), or a property with numbers;
    messages without a number there are counted apart.
    """
    chosen = _selection(from_ms, before_ms, where, key, properties)
    with inspector(settings, topic, target, slack) as look, reading() as shown:
        found = look.average(attribute, chosen, engine=engine, tell=shown.tell, expect=shown.expect)
    view = vars(found)
    if output in ("table", "wide") and attribute == "delay":
        view = {
            name: format_duration(value) if isinstance(value, float) else value
            for name, value in view.items()
        }
    emit_one(view, _AVERAGE, output)


@pending.command(
    epilog=examples(
        "delaylevel pending find orders --key customer-7",
        "delaylevel pending find orders --property invoice=2030-117",
        "delaylevel pending find orders --id public/default/orders-delay-level-partition-3:12:7:0",
    )
)
@click.argument("topic")
@click.option("--id", "message_id", help="Its stable identity, delaylevel.id.")
@click.option("--key", help="Its partition key.")
@click.option("--property", "properties", multiple=True, metavar="K=V", help="A property.")
@click.option("--payload", is_flag=True, help="With the payload, base64 in JSON.")
@output_option
@pass_settings
def find(
    settings: Settings,
    topic: str,
    message_id: str | None,
    key: str | None,
    properties: tuple[str, ...],
    payload: bool,
    output: str,
) -> None:
    """Find pending messages of TOPIC by id, key or property; exit code 1 where there is none."""
    if message_id is None and key is None and not properties:
        raise click.UsageError("give --id, --key or --property")
    if message_id is not None and (key is not None or properties):
        raise click.UsageError("--id names one message: give neither --key nor --property")
    pairs = _pairs(properties)
    with inspector(settings, topic) as look, reading() as shown:
        if message_id is not None:
            found = look.find(message_id, value=payload, tell=shown.tell, expect=shown.expect)
        else:
            chosen = Selection(key=key, properties=pairs)
            found = list(look.rows(chosen, value=payload, tell=shown.tell, expect=shown.expect))
    _print_rows([row_view(row, payload) for row in found], output, payload)
    if not found:
        click.get_current_context().exit(1)


def _print_rows(rows: list[dict[str, Any]], output: str, payload: bool) -> None:
    if payload and output in ("table", "wide"):
        columns: tuple[Column, ...] = (*_ROWS, Column("payload"))
        for row in rows:
            row["payload"] = _shown(row["value_base64"])
    else:
        columns = _ROWS
    if output == "table":
        for row in rows:
            row["key"] = None if row["key"] is None else shortened(row["key"], _KEY)
    for row in rows if output in ("table", "wide") else ():
        row["application"] = ", ".join(
            f"{name}={value}"
            for name, value in row["properties"].items()
            if not name.startswith("delaylevel.")
        )
    emit(rows, columns, output, empty="No pending message matches.")


def _print_lines(rows: Iterable[dict[str, Any]], limit: int, before: Callable[[], None]) -> bool:
    """Print rows as they come; return whether there are more than the limit."""
    lines: Iterator[dict[str, Any]] = iter(rows)
    for number, row in enumerate(lines):
        if number == 0:
            before()
        if limit and number >= limit:
            return True
        click.echo(json.dumps(row))
    return False


def _shown(value: str | None) -> str | None:
    """A payload in a table: its text where it is one, and not too much of it."""
    if value is None:
        return None
    data = base64.b64decode(value)
    text = data.decode(errors="replace")
    return shortened(text, 40)
