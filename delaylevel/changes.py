"""Changes to pending messages: find, cancel, fire and reschedule them, with outcomes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING, Any

from delaylevel.cluster.failures import close_quietly, error_name, may_pass
from delaylevel.errors import (
    CancellationFailedError,
    DelayLevelError,
    EnvelopeError,
    InvalidInputError,
    LevelTopicError,
)
from delaylevel.inspection import Inspector, Selection
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt, Rescheduled, place_of
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient
from delaylevel.producer.producer import DelayLevelProducer
from delaylevel.producer.receipts import accepted, first_copies
from delaylevel.topics.members import metadata_of

if TYPE_CHECKING:
    from delaylevel.inspection.rows import PendingRow

_THREADS = 8
#: Sends one cancellation through a producer of the message's target.
Change = Callable[[Any, Receipt], Outcome | Rescheduled]
Note = Callable[[str], None]

#: The changes, each a call of a producer; ``reschedule`` also takes ``deliver_at``.
cancel: Change = DelayLevelProducer.cancel
fire: Change = DelayLevelProducer.fire_now
reschedule: Callable[..., Rescheduled] = DelayLevelProducer.reschedule


@dataclass(frozen=True)
class Failure:
    """The reason for which a message was not changed, or may not have been."""

    # ``failed`` if nothing was changed, ``both`` if a new message was stored and the old one was
    # not cancelled, ``unconfirmed`` if nobody knows, ``not tried`` after another one's failure.
    outcome: str
    reason: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure for the error of a call that stores something."""
        name = error_name(error)
        text = str(error)
        if text and not isinstance(error, DelayLevelError):
            text = f"{name}: {text}"
        outcome = "failed"
        if may_pass(error):
            outcome = "unconfirmed"
        elif isinstance(error, CancellationFailedError) and error.receipt:
            outcome = "both"
        return cls(outcome, text or name)


@dataclass(frozen=True)
class Changed:
    """A message, the outcome of its cancellation, and the message that replaces it, if any."""

    receipt: Receipt
    outcome: Outcome | Failure
    new: Receipt | None = None

    @property
    def done(self) -> bool:
        """True if the message is cancelled, or its cancellation is accepted."""
        return isinstance(self.outcome, Outcome) and self.outcome.status in (
            OutcomeStatus.ACCEPTED,
            OutcomeStatus.CANCELLED,
        )

    @property
    def undecided(self) -> bool:
        """True if a dispatcher will decide later."""
        return isinstance(self.outcome, Outcome) and not self.outcome.final

    @property
    def view(self) -> dict[str, Any]:
        """The result as one row."""
        if isinstance(self.outcome, Failure):
            view = outcome_view(accepted(self.receipt))
            view |= {"outcome": self.outcome.outcome, "reason": self.outcome.reason}
        else:
            view = outcome_view(self.outcome)
        if self.new is not None:
            new = self.new
            view |= {"new_id": new.id, "new_due_ms": new.due_ms, "receipt": str(new)}
        return view


def outcome_view(one: Outcome) -> dict[str, Any]:
    """Return an outcome as one row."""
    return {
        "id": one.id,
        "target": one.target,
        "outcome": one.status.value,
        "due_ms": one.due_ms,
        "decided_ms": one.decided_ms,
        "released_ms": one.released_ms,
        "reason": one.reason or None,
        "key": one.key or None,
    }


def named_by_receipt(description: LevelTopicDescription, text: str) -> Receipt:
    """Return the receipt in a text, if it is that of a message of the level topic."""
    found = Receipt.parse(text)
    if found.level_topic != description.topic:
        raise InvalidInputError(
            f"the receipt is that of a message in level topic {found.level_topic}, not "
            f"{description.topic}; nothing was changed"
        )
    description.check_target(found.target)
    return found


def pending_rows(look: Inspector, selection: Selection) -> list[PendingRow]:
    """Return the selected messages in due order; only SQL needs the extra ``inspect``."""
    from delaylevel.inspection.rows import rows_of

    if selection.where is not None:
        return list(look.rows(selection))
    return sorted(rows_of(look.batches(selection)), key=lambda row: row.due_ms or 0)


def receipts_of(
    description: LevelTopicDescription, rows: Sequence[PendingRow]
) -> tuple[list[Receipt], int]:
    """Return receipts for rows, and the number of those that are held or unreadable."""
    found: list[Receipt] = []
    for row in rows:
        try:
            envelope = Envelope.read(row.properties, row.id)
        except EnvelopeError:
            continue
        if row.role == Role.HELD.value or envelope.target not in description.known_targets:
            continue
        place = place_of(row.topic, row.ledger, row.entry)
        named = row.id, envelope.due_ms, envelope.target, description.topic, row.key or ""
        found.append(Receipt(*named, place))
    return first_copies(found), len(rows) - len(found)


def change_messages(
    open_client: Callable[[], DelayLevelClient],
    look: Inspector,
    chosen: Sequence[Receipt],
    change: Change,
    timeout_s: float | None,
    note: Note,
) -> list[Changed]:
    """Change messages, and wait for the outcomes of their cancellations, unless the time is None.

    No failure of one message hides the results of the others, which are in the same order.
    """
    description, outcomes = look.description, look.outcomes()
    if timeout_s is not None:
        try:
            start = outcomes.end()
        except LevelTopicError as error:
            note(f"Not waiting: {error}.")
            timeout_s = None

    # Closing it waits for nothing that has not been confirmed.
    client = open_client()
    with contextlib.ExitStack() as stack:
        stack.callback(close_quietly, client, "client")
        producers = {}
        assert client.admin is not None
        for target in sorted({receipt.target for receipt in chosen}):
            if metadata_of(client.admin, TopicName.parse(target)) is None:
                # Opening a producer would create the topic, and release what waits for it.
                raise InvalidInputError(f"{target} does not exist; nothing was changed")
            producers[target] = client.create_producer(
                target,
                enable_delay_level_topic=True,
                delay_level_topic=description.topic,
                create_level_topic=False,
            )
        results = _change_all(producers, chosen, change, note)
    names = {one.receipt.name for one in results if one.undecided}
    if timeout_s is None or not names:
        return results
    try:
        decided = outcomes.wait(start, names, timeout_s)
    except (Exception, KeyboardInterrupt) as error:
        note(f"Outcomes could not be waited for: {Failure.of(error).reason}")
        return results
    return [
        replace(one, outcome=decided.get(one.receipt.name, one.outcome)) if one.undecided else one
        for one in results
    ]


def _change_all(
    producers: Mapping[str, Any], chosen: Sequence[Receipt], change: Change, note: Note
) -> list[Changed]:
    """Change messages, and return the result of each; stop when interrupted or not answered."""
    ended = Event()
    reason = ""

    def attempt(receipt: Receipt) -> Changed:
        nonlocal reason
        if ended.is_set():
            return Changed(receipt, Failure("not tried", reason))
        try:
            result = change(producers[receipt.target], receipt)
        except Exception as error:
            failure = Failure.of(error)
            # The others would only wait for their timeouts, too.
            if failure.outcome == "unconfirmed":
                reason = "the broker did not confirm another message"
                ended.set()
            stored = error.receipt if isinstance(error, CancellationFailedError) else None
            return Changed(receipt, failure, Receipt.parse(stored) if stored else None)
        if isinstance(result, Rescheduled):
            return Changed(receipt, result.outcome, result.receipt)
        return Changed(receipt, result)

    with ThreadPoolExecutor(max(1, min(_THREADS, len(chosen))), "delaylevel-change") as pool:
        futures = [pool.submit(attempt, receipt) for receipt in chosen]
        try:
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            reason = "interrupted"
            ended.set()
            note("Interrupted: the messages that are being changed are finished first.")
            return [future.result() for future in futures]
