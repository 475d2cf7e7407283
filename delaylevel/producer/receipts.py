"""Receipts of scheduled messages, and the outcomes of cancellations."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, TypeVar

import pulsar

from delaylevel.cluster.failures import TRANSIENT_FAILURES, error_name
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import messages_in_range, read_range
from delaylevel.errors import (
    CancellationFailedError,
    DelayLevelError,
    EnvelopeError,
    InvalidDelayError,
    InvalidInputError,
    LevelTopicError,
)
from delaylevel.model.clock import SystemClock
from delaylevel.model.due_time import named_due_ms
from delaylevel.model.envelope import ID, Envelope, check_id
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage, parked_message, properties_of
from delaylevel.model.outcome import CancelledName, Outcome, OutcomeStatus, Receipt, place_of
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status

from .client_calls import as_client_error

log = logging.getLogger(__name__)

# What all copies of a message have in common.
_COPIED = attrgetter("id", "target", "key")
Copy = TypeVar("Copy")
_HELD = "its target could not be written: the message is held"
_SENT_DIRECTLY = "it was due when it was sent, and went straight to its topic"


def new_id() -> str:
    """Return an ID for a message whose application gives none."""
    # A position is not enough: if the connection breaks before a confirmation, the client sends the
    # message again, and the broker stores it twice. Both copies must have the ID of the receipt.
    return uuid.uuid4().hex


def replacement_id(old: Receipt, message_id: str | None, key: str | None) -> str:
    """Return the ID of a message that replaces another one; it must be no copy of that."""
    # Under the ID and key of the old message, the new one would be a copy of it. The two take
    # different ways, so that either can be the first in the window: whatever the dispatcher decides
    # about one of them, released or cancelled, it has decided about both.
    if message_id is None:
        return new_id()
    if check_id(message_id) == old.id and (old.key if key is None else key) == old.key:
        raise InvalidInputError(
            f"message_id={message_id!r} is the ID of the message to replace: the new message would "
            "be a copy of it, and be cancelled with it. Leave message_id out, or give another one; "
            "nothing was sent"
        )
    return message_id


def versioned_id(message_id: str | None) -> str:
    """Return the ID of a message that replaces what waits under an application's ID."""
    # It is a new one each time: under the ID alone, the message would be a copy of those before it.
    if message_id is None:
        raise InvalidInputError(
            "replace=True replaces what waits under an ID: give message_id=…; nothing was sent"
        )
    return check_id(f"{check_id(message_id)}~{uuid.uuid4().hex[:12]}")


def waiting_under(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    target: str,
    message_id: str,
) -> tuple[list[Receipt], list[Outcome]]:
    """Return what waits under an application's ID: what can be cancelled, and outcomes if held."""
    names = re.compile(re.escape(message_id) + "(~[0-9a-f]{12})?")
    found: list[Receipt] = []
    cancelled: set[CancelledName] = set()
    held: dict[CancelledName, Outcome] = {}
    # In the direction in which messages move, so that none is missed.
    roles = (Role.LEVEL, Role.WINDOW, Role.HELD)
    now_ms = SystemClock().now_ms()
    stats = status(admin, description, now_ms, as_described=False, roles=roles)
    for row in stats.rows():
        name = TopicName.parse(row.topic)
        last = admin.last_message_id(name) if row.backlog_entries else None
        if last is None:
            continue
        start = admin.mark_delete_position(name, SUBSCRIPTION).next_entry
        for raw, *at in messages_in_range(client, row.topic, start, last.next_entry):
            stored_id = properties_of(raw).get(ID, "")
            if names.fullmatch(stored_id) is None:
                continue
            message = parked_message(raw, *at)
            try:
                envelope = Envelope.read(message.properties, stored_id)
            except EnvelopeError:
                continue  # it becomes a dead letter
            place = place_of(row.topic, message.position.ledger, message.position.entry)
            receipt = Receipt(
                stored_id, envelope.due_ms, target, description.topic, message.key, place
            )
            if envelope.target != target:
                continue
            if envelope.kind is not None:
                cancelled.add(receipt.name)
            elif row.role is Role.HELD:
                held[receipt.name] = replace(accepted(receipt, _HELD), status=OutcomeStatus.UNKNOWN)
            else:
                found.append(receipt)
    waiting = [receipt for receipt in first_copies(found) if receipt.name not in cancelled]
    return waiting, list(held.values())


def first_copies(found: Iterable[Copy]) -> list[Copy]:
    """Return receipts or rows in due order; of the copies of a message, the first one."""
    # Only that one would be released. Once it is cancelled, the others are dropped as copies of it.
    # Of two with one due time, the later one: a mover may have forwarded the message meanwhile.
    latest_first = sorted(found, key=_due, reverse=True)
    first = {_COPIED(one): one for one in latest_first}
    return sorted(first.values(), key=_due)


def _due(copy: Any) -> int:
    return copy.due_ms or 0  # a row that cannot be read has no due time


def check_scheduled(deliver_at: object, deliver_after: object) -> None:
    """Raise InvalidDelayError if neither a due time nor a delay was given."""
    if deliver_at is None and deliver_after is None:
        raise InvalidDelayError(
            "a scheduled message has a due time: give deliver_at or deliver_after, or call send(); "
            "the message was not sent"
        )


def check_read_back(receipt: Receipt, *given: object) -> None:
    """Raise InvalidInputError if contents of a new message are given, but not its payload."""
    if any(value is not None for value in given):
        raise InvalidInputError(
            f"without a payload, everything of message {receipt.id!r} but its due time is kept: "
            "give the payload, too, or leave properties, keys and event time out; nothing was sent"
        )


def wanted_message(
    target: str,
    level_topic: str,
    receipt: Receipt | str | None,
    message_id: str | None = None,
    deliver_at: int | datetime | None = None,
    partition_key: str | None = None,
) -> Receipt:
    """Return the receipt of the message that a call names, by receipt, its text or an ID."""
    if receipt is None and message_id is not None and deliver_at is not None:
        due_ms = named_due_ms(deliver_at)
        if partition_key is not None and not isinstance(partition_key, str):
            raise InvalidInputError(
                f"partition_key is a str, not {type(partition_key).__name__}; nothing was sent"
            )
        return Receipt(check_id(message_id), due_ms, target, level_topic, partition_key or "")
    if receipt is None or (message_id, deliver_at, partition_key) != (None, None, None):
        raise InvalidInputError(
            "name the message: give its receipt alone, or message_id= with deliver_at= (and "
            "partition_key= if it has one), as it was sent; nothing was sent"
        )
    found = receipt if isinstance(receipt, Receipt) else Receipt.parse(receipt)
    if (found.target, found.level_topic) != (target, level_topic):
        raise InvalidInputError(
            f"the receipt is for {found.target} through {found.level_topic}, and this producer "
            f"for {target} through {level_topic}: use a producer of its topics; nothing was sent"
        )
    return found


def check_cancellable(description: LevelTopicDescription, has_admin: bool) -> None:
    """Raise an error if messages of a level topic cannot be cancelled, as far as is known."""
    topic = description.topic
    if not has_admin:
        raise InvalidInputError(
            f"without admin access, this producer cannot know whether level topic {topic} allows "
            "cancellations: create the client with admin_url=; nothing was sent"
        )
    if not description.cancellable:
        raise LevelTopicError(
            f"messages of level topic {topic} cannot be cancelled: its final window is 'broker'; "
            "create a level topic with final window 'tracker'; nothing was sent"
        )


def seconds_of(timeout: timedelta | float | None) -> float:
    """Return a timeout in seconds; 0 for none."""
    if timeout is None:
        return 0.0
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InvalidInputError(
            f"timeout={timeout!r}: give a timedelta or seconds, zero or more; nothing was sent"
        )
    return float(timeout)


def accepted(receipt: Receipt, reason: str = "") -> Outcome:
    """Return the outcome of a cancellation that is stored and not decided yet."""
    status, due_ms = OutcomeStatus.ACCEPTED, receipt.due_ms
    return Outcome(status, receipt.id, receipt.target, due_ms, reason=reason, key=receipt.key)


def too_late(receipt: Receipt) -> Outcome:
    """Return the outcome for a message that was never parked."""
    return replace(accepted(receipt, _SENT_DIRECTLY), status=OutcomeStatus.TOO_LATE)


@contextmanager
def explained(receipt: Receipt, new: Receipt | None = None) -> Iterator[None]:
    """Explain a failure to send a cancellation; ``new`` is what was stored as replacement."""
    try:
        yield
    except (pulsar.Interrupted, InvalidInputError):
        raise
    except Exception as error:
        if isinstance(error, DelayLevelError) and new is None:
            raise  # nothing was sent, as it says itself
        result = getattr(error, "error", None)  # of pulsar.asyncio
        name = str(result().name) if callable(result) else error_name(error)
        more = "" if new is None else f". The new message is stored; its receipt is {new}"
        failed = CancellationFailedError(
            f"the cancellation of message {receipt.id!r} was not confirmed ({error}): cancel it "
            f"again, twice does no harm{more}",
            name=name,
            transient=name in TRANSIENT_FAILURES,
            receipt=str(new or ""),
        )
        raise as_client_error(failed) from error


def read_back(client: Any, receipt: Receipt) -> tuple[ParkedMessage, Envelope]:
    """Return the stored message of a receipt."""
    why = f"its ledger, {receipt.stored_at}, is deleted"
    if receipt.sent_directly:
        why = _SENT_DIRECTLY
    elif receipt.place is None:
        why = "its receipt has no place"
    else:
        # The broker keeps it until mover or dispatcher have acknowledged everything of its ledger.
        topic, position = receipt.place
        try:
            for message in read_range(client, topic, position, position.next_entry):
                envelope = Envelope.read(message.properties, message.stable_id(topic))
                found = envelope.id, envelope.target, message.key
                if found == (receipt.id, receipt.target, receipt.key):
                    return message, envelope
        except EnvelopeError as error:
            why = f"{receipt.stored_at}: {error}"
        except pulsar.TopicNotFound:
            pass
    raise InvalidInputError(
        f"message {receipt.id!r} cannot be read back ({why}): give the new message's content=; "
        "nothing was sent"
    )
