"""``delaylevel dlq``: dead letters, the messages that could not be read or delivered."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from delaylevel.cli.views.output import emit, emit_one, finish, note
from delaylevel.cli.views.tables import Column
from delaylevel.consumer.retry_topics import find_dead_letters, subscriptions_with_dead_letters
from delaylevel.errors import InvalidInputError, LevelTopicError
from delaylevel.model.envelope import ID
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.position import Position, SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters as deadletters
from delaylevel.mover.dead_letters import DeadLetter, Disposed
from delaylevel.topics.registry import describe

from . import options
from .options import Group, Parsed, Settings, together

if TYPE_CHECKING:
    from delaylevel.cluster.rest.admin import Admin

_LIST = (
    Column("id", "id"),
    Column("dead_ms", "time", head="SINCE", rank=1),
    Column("reason"),
    Column("due", "time", rank=2),
    Column("target", "topic"),
    Column("key", rank=3),
    Column("size", "number", rank=4),
)
_SHOW = (*_LIST, Column("source"), Column("properties"), Column("value"))
_DISPOSED = (
    Column("id", "id"),
    Column("outcome"),
    Column("message_id"),
    Column("target", "topic", rank=1),
    Column("reason", rank=2),
)

_ID = Parsed("id", Position.parse)
_NOT_FOUND = "no dead letter has this ID now: `delaylevel dlq list` shows the present ones"
_subscription = click.option(
    "--subscription",
    metavar="NAME",
    help="Subscription of the business topic TOPIC whose failed messages are meant.",
)
_reason = click.option("--reason", metavar="TEXT", help="Part of the reason to match.")
_ids = click.argument("ids", nargs=-1, type=_ID, metavar="[ID]...")
_chosen = together(_ids, _subscription, options.everything, _reason)


@click.group(cls=Group)
def dlq() -> None:
    """Show, replay or discard dead letters.

    A dead letter is a message in a level topic that a mover or dispatcher could not read, or that
    its target refused because of its size. A subscription has dead letters of its own: messages
    that a listener could not handle.
    """


@options.topic_command(
    dlq,
    "delaylevel dlq list orders",
    "delaylevel dlq list orders --subscription billing",
    name="list",
)
@_subscription
@_reason
def list_(
    settings: Settings, topic: str, subscription: str | None, reason: str | None, output: str
) -> None:
    """List the dead letters of TOPIC.

    They are listed oldest first, each with its reason. TOPIC is a business topic, its level topic,
    or any topic that belongs to it; or the dead-letter topic of a subscription. Subscriptions that
    have dead letters are named. Nothing is acknowledged or moved.
    """
    with _connected(settings, topic, subscription) as (client, admin, described, source):
        rows = (
            _view(letter, output)
            for letter in deadletters.dead_letters(client, admin, described, source)
            if reason is None or reason in letter.reason
        )
        emit(rows, _LIST, output, empty="No dead letters.")
        others = subscriptions_with_dead_letters(admin, described) if source is None else []
    for business, name, entries in others:
        command = f"delaylevel dlq list {shell(business.short)} --subscription {shell(name)}"
        note(f"Subscription {name} of {business.short} has dead letters ({entries:,}): `{command}`")


@options.topic_command(
    dlq, "delaylevel dlq show orders 12:0:-1", "delaylevel dlq show orders 12:0:-1 -o json"
)
@click.argument("id_", type=_ID, metavar="ID")
@_subscription
def show(
    settings: Settings, topic: str, subscription: str | None, id_: Position, output: str
) -> None:
    """Show a dead letter of TOPIC.

    The result includes its properties and payload. A payload that is not text is shown in base64.
    """
    with _connected(settings, topic, subscription) as (client, admin, described, source):
        letters = deadletters.dead_letters(client, admin, described, source)
        letter = next((each for each in letters if each.position == id_), None)
    if letter is None:
        raise LevelTopicError(_NOT_FOUND)
    row = {**_view(letter, output), **_content(letter)}
    if output == "table":
        row["properties"] = [f"{key}={value}" for key, value in row["properties"].items()]
    emit_one(row, _SHOW, output)


@options.topic_command(
    dlq,
    "delaylevel dlq replay orders --all",
    "delaylevel dlq replay orders --subscription billing --all",
    "delaylevel dlq replay orders 12:0:-1 --new-target invoices",
    "delaylevel dlq replay orders --reason 'delaylevel.due is missing' --at +10m",
)
@_chosen
@click.option(
    "--new-target",
    "target",
    metavar="TOPIC",
    help="Business topic to send them to, instead of their own.",
)
@options.at("due_ms")
def replay(
    settings: Settings,
    topic: str,
    subscription: str | None,
    target: str | None,
    due_ms: int | None,
    output: str,
    **selected: Any,
) -> None:
    """Route dead letters of TOPIC again.

    Use it, for example, after `delaylevel levels create` has added the target that they name. They
    keep their IDs, and their due times unless --at replaces them. Those that still cannot be read
    or delivered are `still dead`. Those of a subscription go to that subscription only, and its
    attempts are counted from 1 again. There is a row for each message. The exit code is 1 if one of
    them is still a dead letter, or none is found.
    """
    chosen = _chooser(**selected)
    full = TopicName.parse(target).full if target is not None else None
    with _connected(settings, topic, subscription) as (client, admin, described, source):
        if full is not None:
            described.check_target(full)
        letters = deadletters.replay(
            client,
            admin,
            described,
            chosen,
            target=full,
            due_ms=due_ms,
            target_client=settings.open_client,
            source=source,
        )
        _finish(letters, target=full, missing=selected["ids"], output=output)


@options.topic_command(
    dlq,
    "delaylevel dlq discard orders --all --count 12",
    "delaylevel dlq discard orders 12:0:-1 12:1:-1 --count 2",
)
@_chosen
@options.count(required=True)
def discard(
    settings: Settings,
    topic: str,
    subscription: str | None,
    count: int,
    output: str,
    **selected: Any,
) -> None:
    """Delete dead letters of TOPIC.

    There is a row for each message. The exit code is 1 if one of them may still be there, or none
    is found.
    """
    chosen = _chooser(**selected)
    with _connected(settings, topic, subscription) as (client, admin, described, source):
        gone = deadletters.discard(client, admin, described, chosen, count, source)
        _finish(gone, target=None, missing=(), output=output)


def _finish(
    letters: Iterable[Disposed], *, target: str | None, missing: Iterable[Position], output: str
) -> None:
    """Print a row for each chosen dead letter, and for each ID that names none."""
    not_found = dict.fromkeys(missing)

    def rows() -> Iterator[tuple[dict[str, Any], bool]]:
        for one in letters:
            not_found.pop(one.letter.position, None)
            row = {
                "id": str(one.letter.position),
                "outcome": one.outcome,
                "message_id": one.letter.message.properties.get(ID),
                "target": target or one.letter.target,
                "reason": one.reason or None,
            }
            yield row, one.done
        for position in not_found:
            yield {"id": str(position), "outcome": "not found", "reason": _NOT_FOUND}, False

    finish(rows(), _DISPOSED, output, empty="There is no such dead letter.")


@contextmanager
def _connected(
    settings: Settings, topic: str, subscription: str | None
) -> Iterator[tuple[Any, Admin, LevelTopicDescription, SourcePartition | None]]:
    """Find dead letters; the source is that of a subscription, None for the level topic's own."""
    with settings.admin() as admin:
        if subscription is None:
            described, source = describe(admin, topic, search=True), None
        else:
            described, source = find_dead_letters(admin, topic, subscription)
        with settings.client() as client:
            yield client, admin, described, source


def _chooser(
    ids: tuple[Position, ...], everything: bool, reason: str | None
) -> Callable[[DeadLetter], bool]:
    if bool(ids) + everything + (reason is not None) != 1:
        raise InvalidInputError(
            "select dead letters by one of these: IDs from `delaylevel dlq list`, --reason, --all"
        )
    return lambda letter: (
        everything or letter.position in ids or (reason is not None and reason in letter.reason)
    )


def _view(letter: DeadLetter, output: str) -> dict[str, Any]:
    """Return a dead letter as one row; for a table, its due time is a number if it is one."""
    message, due = letter.message, letter.due
    is_number = output == "table" and due is not None and re.fullmatch(r"\d{1,18}", due)
    return {
        "id": str(letter.position),
        "dead_ms": message.publish_ms,
        "reason": letter.reason,
        "due": int(due) if due and is_number else due,
        "target": letter.target,
        "key": message.key or None,
        "size": len(message.value or b""),
        "source": letter.source,
    }


def _content(letter: DeadLetter) -> dict[str, Any]:
    """Return the other keys of a dead letter; ``value`` is None for a null value."""
    message = letter.message
    content: dict[str, Any] = {
        "properties": dict(message.properties),
        "event_ms": message.event_ms or None,
        "encoding": "text",
        "value": None,
    }
    if message.value is not None:
        try:
            content["value"] = message.value.decode()
        except UnicodeDecodeError:
            content["encoding"] = "base64"
            content["value"] = base64.b64encode(message.value).decode()
    return content
