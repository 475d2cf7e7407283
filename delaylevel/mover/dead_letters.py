"""Dead letters: messages that could not be read or delivered, to look at, replay or discard.

They are in the level topic's dead-letter topic, unchanged, with the reason. A batched entry is
acknowledged as a whole: if only some of its messages are removed, the others are appended again.
There may be any number of them, so only the letters of some entries are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from delaylevel.cluster.failures import may_pass, translate_errors
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_unacknowledged
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import DelayLevelError, EnvelopeError, StillPendingError
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

# Outcomes by the names of counts.
_OUTCOMES = {"window": "handed off", "due": "delivered", "dead": "still dead"}
# Dead letters may be large, so the client prefetches few of them.
_PREFETCH = 100
# Letters, and bytes, that are read before they are forwarded or deleted, in whole entries.
_TOGETHER = 1000
_BYTES_TOGETHER = 16 << 20


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
    return _present(client, admin, source)()


def _present(
    client: Any, admin: TopicAdmin, source: SourcePartition
) -> Callable[[], Iterator[DeadLetter]]:
    """Return a function that reads the dead letters that there are now."""
    last = admin.last_message_id(source.name)
    if last is None:
        return lambda: iter(())
    start, end = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry, last.next_entry
    read = partial(read_unacknowledged, client, admin, source, start, end, _PREFETCH)
    return lambda: map(DeadLetter, read())


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
) -> Iterator[Disposed]:
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

    Yields:
        The chosen dead letters, oldest first, each with its outcome, while they are replayed: who
        stops taking outcomes stops the replay.

    Raises:
        AlreadyRunningError: another replay or discard is running; nothing was replayed.
        BrokerError: no more dead letters can be read. A failure of one message is its outcome, and
            later ones are not tried if its outcome is unknown.
    """
    steady = SteadyClock(clock or SystemClock())
    source = source or source_of(description)

    def mended(letter: DeadLetter) -> ParkedMessage:
        message = letter.mended(target, due_ms)
        kind = open_envelope(description, source.topic, message).kind
        if kind is not None and not (target is None and due_ms is None):
            raise EnvelopeError(
                f"{env.KIND} is {kind!r}: the target and due time of such a record are those of "
                "its message; replay it without changing them"
            )
        if due_ms is not None:  # as for a new message: a cancellation could not follow it
            Router(description.levels).decide(due_ms, steady.now_ms())
        return message

    with (
        closing(PartitionLock(client, admin, [source], "dlq")) as lock,
        closing(TargetClients(client, target_client)) as clients,
        closing(Forwarder(client, admin, description, steady, client_of=clients.of)) as forwarder,
    ):
        letters = _present(client, admin, source)()
        forward = partial(_forward, forwarder, source, mended)
        yield from _dispose(client, lock, source, letters, chosen, forward)


def discard(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    chosen: Callable[[DeadLetter], bool],
    count: int,
    source: SourcePartition | None = None,
) -> Iterator[Disposed]:
    """Delete dead letters.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        chosen: function that returns True for a dead letter to delete.
        count: expected number of chosen messages; if it differs, nothing is deleted.
        source: as for :func:`dead_letters`.

    Yields:
        The chosen dead letters, each with its outcome, while they are deleted.

    Raises:
        StillPendingError: another number of messages is chosen.
        AlreadyRunningError: another replay or discard is running.
    """
    source = source or source_of(description)
    with closing(PartitionLock(client, admin, [source], "dlq")) as lock:
        read = _present(client, admin, source)
        found = sum(1 for _ in filter(chosen, read()))
        if found != count:
            raise StillPendingError(
                f"{found} dead letters are chosen, not {count}: nothing was deleted", found
            )

        def gone(picked: Sequence[DeadLetter]) -> _Acted:
            outcomes = [Disposed(letter, "discarded") for letter in picked]
            return outcomes, {letter.position for letter in picked}, ""

        yield from _dispose(client, lock, source, read(), chosen, gone)


#: What became of letters, the positions of those that may be removed, and the reason to stop.
_Acted = tuple[list[Disposed], set[Position], str]


def _forward(
    forwarder: Forwarder,
    source: SourcePartition,
    mended: Callable[[DeadLetter], ParkedMessage],
    letters: Sequence[DeadLetter],
) -> _Acted:
    """Forward dead letters, all together, or one by one if a topic refuses some of them."""
    found: dict[Position, Disposed] = {}
    taken: set[Position] = set()
    ended = ""
    groups = [letters]
    for group in groups:
        outcome = reason = ""
        try:
            for letter in group:
                try:
                    forwarder.forward_all(source, (mended(letter),), letter)
                except EnvelopeError as error:
                    found[letter.position] = Disposed(letter, _OUTCOMES["dead"], error.reason)
            forwarder.flush()
        except KeyboardInterrupt:
            outcome, reason = "unconfirmed", "interrupted"
            ended = reason
        except DelayLevelError as error:
            outcome, reason = "failed", str(error)
            if may_pass(error):
                # Some may be stored, and the next ones would fail now as well.
                outcome, ended = "unconfirmed", "the broker did not confirm another message"
        for letter, place in forwarder.placed:
            name, why = place.counter, place.counted_by if place.counter == "dead" else ""
            found[letter.position] = Disposed(letter, _OUTCOMES.get(name, name), why)
            taken.add(letter.position)
        forwarder.placed.clear()
        rest = [letter for letter in group if letter.position not in found]
        if outcome == "failed" and len(group) > 1:
            groups += [[letter] for letter in rest]  # the loop goes on with them
        else:
            found |= {letter.position: Disposed(letter, outcome, reason) for letter in rest}
        if ended:
            break
    for letter in letters:
        found.setdefault(letter.position, Disposed(letter, "not tried", ended))
    return [found[letter.position] for letter in letters], taken, ended


def _dispose(
    client: Any,
    lock: PartitionLock,
    source: SourcePartition,
    letters: Iterator[DeadLetter],
    chosen: Callable[[DeadLetter], bool],
    act: Callable[[Sequence[DeadLetter]], _Acted],
) -> Iterator[Disposed]:
    """Act on the chosen letters and remove them, until one is left without a known outcome."""
    ended = ""
    with closing(DeadLetterTopic(client, source.topic)) as own:
        for together in _together(letters):
            picked = list(filter(chosen, together))
            if ended or not picked:
                yield from (Disposed(letter, "not tried", ended) for letter in picked)
                continue
            acted, taken, ended = act(picked)
            left, reason = _remove(lock, own, source, together, taken)
            for one in acted:
                if one.done and one.letter.position.entry_start in left:
                    outcome = "unconfirmed" if one.outcome == "discarded" else one.outcome
                    one = Disposed(one.letter, outcome, reason)
                    ended = "the removal of another message was not confirmed"
                yield one


def _together(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Yield dead letters in lists of whole entries."""
    found: list[DeadLetter] = []
    size = 0
    for _, entry in groupby(letters, lambda letter: letter.position.entry_start):
        for letter in entry:
            found.append(letter)
            size += letter.message.size
        if len(found) >= _TOGETHER or size >= _BYTES_TOGETHER:
            yield found
            found, size = [], 0
    yield found


def _remove(
    lock: PartitionLock,
    own: DeadLetterTopic,
    source: SourcePartition,
    letters: Collection[DeadLetter],
    taken: Collection[Position],
) -> tuple[Collection[Position], str]:
    """Acknowledge the entries of taken letters, after a copy of the rest; return what failed."""
    entries = {position.entry_start for position in taken}
    rest = [
        letter.message
        for letter in letters
        if letter.position.entry_start in entries and letter.position not in taken
    ]
    try:
        if rest:
            own.store((message, message.properties) for message in rest)
        for position in sorted(entries):
            with translate_errors():
                lock.acknowledge_entry(source, position)
            entries.remove(position)
    except DelayLevelError as error:
        return entries, (
            f"it may still be in {source.topic}, which did not confirm its removal ({error})"
        )
    return (), ""
