"""Dead letters: messages that could not be read or delivered, to look at, replay or discard.

They are in the level topic's dead-letter topic, unchanged, with the reason. A batched entry is
acknowledged as a whole: if only some of its messages are removed, the others are appended again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from delaylevel.cluster.failures import may_pass, translate_errors
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_unacknowledged
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import DelayLevelError, EnvelopeError, LevelTopicError, StillPendingError
from delaylevel.model import envelope as env
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.due_time import NEVER_MS
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position, SourcePartition
from delaylevel.model.retries import replayed_properties
from delaylevel.model.router import Router

from .forwarder import Forwarder
from .hop import open_envelope

#: The outcome of a letter that cannot be read or delivered now, either.
STILL_DEAD = "still dead"
# Outcomes by the names of counts.
_OUTCOMES = {"window": "handed off", "due": "delivered", "dead": STILL_DEAD}
# Dead letters may be large, so the client prefetches few of them.
_PREFETCH = 100


@dataclass(frozen=True)
class DeadLetter:
    """A message in the dead-letter topic, which a mover or dispatcher could not read or deliver."""

    message: ParkedMessage

    @property
    def position(self) -> Position:
        """Position in the dead-letter topic."""
        return self.message.position

    @property
    def reason(self) -> str:
        """Reason for the dead letter, in one line."""
        return self.message.properties.get(env.REASON, "")

    @property
    def source(self) -> str:
        """Place where the message was read: ``topic-partition:ledger:entry:batch``."""
        return self.message.properties.get(env.SOURCE, "")

    @property
    def due(self) -> str | None:
        """Due time in the message's properties, readable or not; None if it has none."""
        return self.message.properties.get(env.DUE)

    @property
    def target(self) -> str | None:
        """Business topic in the message's properties; None if it has none."""
        return self.message.properties.get(env.TARGET)

    def mended(self, target: str | None, due_ms: int | None) -> ParkedMessage:
        """Return the message as it was before, with another target or due time if given.

        It keeps its id. A message without one gets the id that the mover would have given it, from
        the place where it was read. A control record has the id of its message, or none. A message
        does not expire any more: whoever replays it wants it delivered. The attempts of a listener
        to handle it are counted from 1 again; for another target, nothing of them is left.
        """
        other = target is not None and target != self.target
        properties = replayed_properties(self.message.properties, other_target=other)
        properties.pop(env.REASON, None)
        if env.KIND not in properties:
            properties[env.EXPIRES] = str(NEVER_MS)
        source = properties.pop(env.SOURCE, "")
        if target is not None:
            properties[env.TARGET] = target
        if due_ms is not None:
            properties[env.DUE] = str(due_ms)
        if source and not properties.get(env.ID) and env.KIND not in properties:
            properties[env.ID] = source
        return self.message._replace(properties=properties)


class Disposed(NamedTuple):
    """A chosen dead letter, and what became of it.

    Attributes:
        letter: the dead letter.
        outcome: one of ``parked``, ``handed off``, ``delivered``, ``held``, ``expired``,
            ``dropped``, ``still dead`` and ``discarded``; or ``failed``, ``unconfirmed`` (nobody
            knows) and ``not tried``, after which it is still a dead letter.
        reason: the reason for an outcome that was not asked for; empty otherwise.
    """

    letter: DeadLetter
    outcome: str
    reason: str = ""

    @property
    def done(self) -> bool:
        """True if the message is no dead letter any more, as far as is known."""
        return not self.reason


def source_of(description: LevelTopicDescription) -> SourcePartition:
    """Return the only partition of the dead-letter topic as a source.

    Its level is -1: like a new message, a message from here may enter every level.
    """
    topic = description.dead_letter_topic.partition(0).full
    return SourcePartition(description.topic, topic, Role.DEAD_LETTER, -1, 0, 0)


def owner_of(description: LevelTopicDescription, source: SourcePartition | None) -> str:
    """Return the topic whose dead letters these are, for messages to people."""
    if source is None or source == source_of(description):
        return description.topic
    return source.name.without_partition.full


def dead_letters(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    source: SourcePartition | None = None,
) -> Iterator[DeadLetter]:
    """Yield the messages in the dead-letter topic, oldest first, without a lock.

    Nothing is acknowledged.

    Args:
        source: another dead-letter topic, that of a subscription, here and in the other functions.
    """
    source = source or source_of(description)
    last = admin.last_message_id(source.name)
    if last is None:
        return
    start = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
    found = read_unacknowledged(client, admin, source, start, last.next_entry, _PREFETCH)
    yield from map(DeadLetter, found)


def replay(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    chosen: Callable[[DeadLetter], bool],
    *,
    target: str | None = None,
    due_ms: int | None = None,
    clock: Clock | None = None,
    target_client: Callable[[], Any] | None = None,
    source: SourcePartition | None = None,
) -> list[Disposed]:
    """Forward dead letters, as a mover would have forwarded them.

    By its due time, a message goes into a level, into the final window, or to the business topic.
    It keeps its id. A message that still cannot be read stays.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        description: the level topic, with every target that it has now.
        chosen: function that returns True for a dead letter to replay.
        target: full name of the business topic, instead of the one in the properties.
        due_ms: due time in ms since the epoch, instead of the one in the properties.
        clock: clock for routing.
        target_client: function that returns a new client of the same cluster, for connections to
            the targets; None to publish with ``client``.
        source: as for :func:`dead_letters`.

    Returns:
        The chosen dead letters, oldest first, each with its outcome.

    Raises:
        AlreadyRunningError: another replay or discard is running; nothing was replayed.
        BrokerError: the dead letters cannot be read; nothing was replayed. A failure of one message
            is its outcome, and later ones are not tried if its outcome is unknown.
    """
    steady = SteadyClock(clock or SystemClock())
    source = source or source_of(description)
    disposed: list[Disposed] = []
    with (
        closing(PartitionLock(client, admin, [source], "dlq")) as lock,
        closing(TargetClients(client, target_client)) as clients,
        closing(Forwarder(client, admin, description, steady, client_of=clients.of)) as forwarder,
    ):
        letters = list(dead_letters(client, admin, description, source))
        taken = []
        ended = ""
        for letter in filter(chosen, letters):
            if ended:
                disposed.append(Disposed(letter, "not tried", ended))
                continue
            try:
                mended = _mended(description, source, letter, target, due_ms, steady.now_ms())
                forwarder.forward(source, mended)
                found = forwarder.flush()
            except EnvelopeError as error:
                disposed.append(Disposed(letter, STILL_DEAD, error.reason))
            except DelayLevelError as error:
                outcome = "unconfirmed" if may_pass(error) else "failed"
                disposed.append(Disposed(letter, outcome, str(error)))
                if outcome == "unconfirmed":
                    ended = "the broker did not confirm another message"
            except KeyboardInterrupt:
                ended = "interrupted"
                disposed.append(Disposed(letter, "unconfirmed", ended))
            else:
                taken.append(letter)
                (name,) = (name for name, count in found.counts().items() if count)
                reason = "".join(found.dead)
                disposed.append(Disposed(letter, _OUTCOMES.get(name, name), reason))
        return _removed(client, lock, source, letters, taken, disposed)


def _mended(
    description: LevelTopicDescription,
    source: SourcePartition,
    letter: DeadLetter,
    target: str | None,
    due_ms: int | None,
    now_ms: int,
) -> ParkedMessage:
    """Return the message of a dead letter for a replay."""
    mended = letter.mended(target, due_ms)
    envelope = open_envelope(description, source.topic, mended)
    if envelope.kind is not None and not (target is None and due_ms is None):
        raise EnvelopeError(
            f"{env.KIND} is {envelope.kind!r}: the target and due time of such a record are those "
            "of its message; replay it without changing them"
        )
    if due_ms is not None:  # as for a new message: a cancellation could not follow it
        Router(description.levels).decide(due_ms, now_ms)
    return mended


def discard(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    chosen: Callable[[DeadLetter], bool],
    count: int,
    source: SourcePartition | None = None,
) -> list[Disposed]:
    """Delete dead letters.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        chosen: function that returns True for a dead letter to delete.
        count: expected number of chosen messages; if it differs, nothing is deleted.
        source: as for :func:`dead_letters`.

    Returns:
        The chosen dead letters, each with its outcome.

    Raises:
        StillPendingError: another number of messages is chosen.
        AlreadyRunningError: another replay or discard is running.
    """
    source = source or source_of(description)
    with closing(PartitionLock(client, admin, [source], "dlq")) as lock:
        letters = list(dead_letters(client, admin, description, source))
        taken = [letter for letter in letters if chosen(letter)]
        if len(taken) != count:
            raise StillPendingError(
                f"{len(taken)} dead letters of {owner_of(description, source)} are chosen, not "
                f"{count}: nothing was deleted",
                len(taken),
            )
        disposed = [Disposed(letter, "discarded") for letter in taken]
        return _removed(client, lock, source, letters, taken, disposed)


def find(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    position: Position,
    source: SourcePartition | None = None,
) -> DeadLetter:
    """Return the dead letter at a position.

    Raises:
        LevelTopicError: there is none, or not any more.
    """
    for letter in dead_letters(client, admin, description, source):
        if letter.position == position:
            return letter
    raise LevelTopicError(
        f"no dead letter of {owner_of(description, source)} is at {position}: `delaylevel dlq "
        "list` shows those that are there"
    )


def _removed(
    client: Any,
    lock: PartitionLock,
    source: SourcePartition,
    letters: Collection[DeadLetter],
    taken: Collection[DeadLetter],
    disposed: Sequence[Disposed],
) -> list[Disposed]:
    """Acknowledge the entries of the taken letters, after a copy of the others in them.

    Returns:
        The outcomes; those of letters that could not be acknowledged are changed.
    """
    positions = {letter.position for letter in taken}
    entries = {position.entry_start for position in positions}
    rest = [
        letter
        for letter in letters
        if letter.position.entry_start in entries and letter.position not in positions
    ]
    try:
        if rest:
            with closing(DeadLetterTopic(client, source.topic)) as own:
                own.store((letter.message, letter.message.properties) for letter in rest)
        for position in sorted(entries):
            with translate_errors():
                lock.acknowledge_entry(source, position)
            entries.remove(position)
    except DelayLevelError as error:
        reason = f"it may still be in {source.topic}, which did not confirm its removal ({error})"
        return [
            one._replace(
                outcome="unconfirmed" if one.outcome == "discarded" else one.outcome, reason=reason
            )
            if one.done and one.letter.position.entry_start in entries
            else one
            for one in disposed
        ]
    return list(disposed)
