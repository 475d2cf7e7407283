"""Messages that could not be understood: looked at, sent on their way again, or thrown away.

They stand in the level topic's dead-letter topic, as they were, with the reason. A batched entry
is acknowledged as a whole: where only a part of one is taken out, the rest is appended again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import OperatorAdmin
from delaylevel.cluster.publisher import UNBATCHED_SETTINGS, Publisher, close_all, open_producer
from delaylevel.cluster.reader import read_range
from delaylevel.errors import (
    BrokerError,
    ClientError,
    EnvelopeError,
    LevelTopicError,
    StillPendingError,
)
from delaylevel.model import envelope as env
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position
from delaylevel.model.report import ForwardReport
from delaylevel.model.source_partition import SourcePartition

from .forwarder import Forwarder


@dataclass(frozen=True)
class DeadLetter:
    """A message that a mover or dispatcher could not understand.

    Attributes:
        message: as it stands in the dead-letter topic.
    """

    message: ParkedMessage

    @property
    def position(self) -> Position:
        """Where it stands in the dead-letter topic."""
        return self.message.position

    @property
    def reason(self) -> str:
        """Why it is there, in one line."""
        return self.message.properties.get(env.REASON, "")

    @property
    def source(self) -> str:
        """Where it was read: ``topic-partition:ledger:entry:batch``."""
        return self.message.properties.get(env.SOURCE, "")

    @property
    def due(self) -> str | None:
        """The due time that is written on it, readable or not; None for none."""
        return self.message.properties.get(env.DUE)

    @property
    def target(self) -> str | None:
        """The business topic that is written on it; None for none."""
        return self.message.properties.get(env.TARGET)

    def mended(self, target: str | None, due_ms: int | None) -> ParkedMessage:
        """Return the message as it was before, with what is given here instead of its own.

        It keeps its id; without one it gets that of the place where it was read, as the mover would
        have given it.
        """
        properties = dict(self.message.properties)
        properties.pop(env.REASON, None)
        source = properties.pop(env.SOURCE, "")
        if target is not None:
            properties[env.TARGET] = target
        if due_ms is not None:
            properties[env.DUE] = str(due_ms)
        if source and not properties.get(env.ID):
            properties[env.ID] = source
        return self.message._replace(properties=properties)


@dataclass
class ReplayReport:
    """What became of dead letters that were to be replayed.

    Attributes:
        forwarded: what was sent on, and to where.
        refused: those that cannot be understood still, by reason; they stay where they are.
    """

    forwarded: ForwardReport = field(default_factory=ForwardReport)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def replayed(self) -> int:
        """How many are on their way again."""
        return self.forwarded.total


def source_of(description: LevelTopicDescription) -> SourcePartition:
    """Return the dead-letter topic's one partition as a place where messages are read.

    Its level is -1: what is sent on from here may enter every level, as from an application.
    """
    topic = description.dead_letter_topic.partition(0).full
    return SourcePartition(description.topic, topic, Role.DEAD_LETTER, -1, 0, 0)


def dead_letters(
    client: Any, admin: OperatorAdmin, description: LevelTopicDescription
) -> Iterator[DeadLetter]:
    """Yield what is in the dead-letter topic, oldest first; nothing is acknowledged or locked.

    Args:
        client: a ``pulsar.Client``.
        admin: of the same cluster.
        description: the level topic.
    """
    source = source_of(description)
    last = admin.last_message_id(source.name)
    if last is None or last.entry < 0:
        return
    start = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
    done = admin.acknowledged_ranges(source.name, SUBSCRIPTION)
    for message in read_range(client, source.topic, start, last.next_entry):
        if not any(message.position in item for item in done):
            yield DeadLetter(message)


def replay(
    client: Any,
    admin: OperatorAdmin,
    description: LevelTopicDescription,
    chosen: Callable[[DeadLetter], bool],
    *,
    target: str | None = None,
    due_ms: int | None = None,
    clock: Clock | None = None,
) -> ReplayReport:
    """Send dead letters on their way again, as if they had just been understood.

    They go where their due time says: into a level, the final window, or to the business topic
    at once. What still cannot be understood stays. Each keeps its id.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: of the same cluster.
        description: the level topic, with every target that it has now.
        chosen: says which.
        target: the full name of the business topic instead of what is written on them.
        due_ms: when they are due (ms since the epoch), instead of what is written on them.
        clock: the present time that routing goes by.

    Raises:
        AlreadyRunningError: somebody else replays or discards.
        BrokerError: something was not confirmed; it is still in the dead-letter topic.
    """
    clock = clock or SystemClock()
    source, report = source_of(description), ReplayReport()
    hold = PartitionLock(client, admin, [source], "dlq")
    forwarder = Forwarder(client, admin, description, clock)
    try:
        letters = list(dead_letters(client, admin, description))
        taken = set()
        for letter in letters:
            if not chosen(letter):
                continue
            mended = letter.mended(target, due_ms)
            reason = _still_dead(description, mended)
            if reason is not None:
                report.refused[reason] += 1
                continue
            forwarder.forward(source, mended, clock.now_ms())
            taken.add(letter.position)
        report.forwarded.add(forwarder.flush())
        _take_out(client, hold, source, letters, taken)
    finally:
        forwarder.close()
        hold.close()
    return report


def discard(
    client: Any,
    admin: OperatorAdmin,
    description: LevelTopicDescription,
    chosen: Callable[[DeadLetter], bool],
    count: int,
) -> int:
    """Throw dead letters away.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: of the same cluster.
        description: the level topic.
        chosen: says which.
        count: how many messages these are: with another number nothing is thrown away.

    Returns:
        How many were thrown away.

    Raises:
        StillPendingError: another number of messages is chosen.
        AlreadyRunningError: somebody else replays or discards.
    """
    source = source_of(description)
    hold = PartitionLock(client, admin, [source], "dlq")
    try:
        letters = list(dead_letters(client, admin, description))
        taken = {letter.position for letter in letters if chosen(letter)}
        if len(taken) != count:
            raise StillPendingError(
                f"{len(taken)} dead letters of {description.topic} are chosen, not {count}: "
                "nothing was thrown away",
                len(taken),
            )
        _take_out(client, hold, source, letters, taken)
    finally:
        hold.close()
    return count


def find(
    client: Any, admin: OperatorAdmin, description: LevelTopicDescription, position: Position
) -> DeadLetter:
    """Return the dead letter that stands at a position.

    Raises:
        LevelTopicError: there is none, or not any more.
    """
    for letter in dead_letters(client, admin, description):
        if letter.position == position:
            return letter
    raise LevelTopicError(
        f"no dead letter of {description.topic} stands at {position}: `delaylevel dlq list` shows "
        "those that are there"
    )


def _still_dead(description: LevelTopicDescription, message: ParkedMessage) -> str | None:
    try:
        envelope = Envelope.read(message.properties)
    except EnvelopeError as error:
        return error.reason
    if envelope.target not in description.targets:
        return f"target {envelope.target} is not one of level topic {description.topic}"
    return None


def _take_out(
    client: Any,
    hold: PartitionLock,
    source: SourcePartition,
    letters: Collection[DeadLetter],
    taken: Collection[Position],
) -> None:
    """Acknowledge what was taken; what shares an entry with it is appended again before."""
    entries = {position.entry_start for position in taken}
    rest = [
        letter
        for letter in letters
        if letter.position.entry_start in entries and letter.position not in taken
    ]
    if rest:
        _append(client, source, rest)
    for position in sorted(entries):
        hold.acknowledge_entry(source, position)


def _append(client: Any, source: SourcePartition, letters: Collection[DeadLetter]) -> None:
    try:
        producer = open_producer(client, source.topic, UNBATCHED_SETTINGS)
    except ClientError as error:
        raise BrokerError(
            f"cannot write to {source.topic} ({error.name}); nothing was acknowledged"
        ) from error
    outlet: Publisher[None] = Publisher(producer)
    try:
        for letter in letters:
            outlet.send(letter.message, letter.message.properties, None)
        failure, _, _ = outlet.settle()
        if failure is not None:
            raise BrokerError(
                f"{source.topic} did not confirm ({failure}); nothing was acknowledged"
            )
    finally:
        close_all([outlet])
