"""The outcomes of cancellations: those that are stored, and those that come."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from delaylevel.cluster.client_parts.cores import has_core
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import PartitionReader, read_range
from delaylevel.errors import EnvelopeError, LevelTopicError, NotFoundError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.outcome import CancelledName, Outcome, OutcomeStatus
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.topic_name import TopicName

# Wait for a record, in ms. The client does not notice Ctrl-C or a close meanwhile.
_POLL_MS = 100


class Outcomes:
    """The outcomes topic of a level topic; each call of the client enters ``in_client``."""

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        in_client: AbstractContextManager[Any] | None = None,
    ) -> None:
        if not description.cancellable:
            raise LevelTopicError(
                f"level topic {description.topic} has no outcomes: with the final window "
                f"{description.final_window.value!r}, messages cannot be cancelled"
            )
        self._client = client
        self._admin = admin
        self._partition: TopicName = description.outcomes_topic.partition(0)
        self._remedy = f"run `{description.creation_command()}`"
        self._in_client = in_client or nullcontext()

    def end(self) -> Position:
        """Return the position behind the last outcome; raise LevelTopicError without the topic."""
        try:
            last = self._admin.last_message_id(self._partition)
        except NotFoundError as error:
            raise LevelTopicError(
                f"no outcome can be read, because {self._partition.without_partition} does not "
                f"exist: {self._remedy}. Cancellations are decided all the same, and the "
                "dispatcher stores the outcomes that it still has when the topic is there"
            ) from error
        return EARLIEST if last is None else last.next_entry

    def stored(self, message_id: str | None = None) -> list[Outcome]:
        """Return the outcome of each message, by the time of the decision; the last one counts."""
        found: dict[tuple[str, str, str], Outcome] = {}
        for message in read_range(self._client, self._partition.full, EARLIEST, self.end()):
            outcome = _outcome(message.properties)
            if outcome is None or message_id not in (None, outcome.id):
                continue
            key = outcome.id, outcome.target, outcome.key
            known = found.get(key)
            # It says nothing about a message that another cancellation found.
            says_nothing = outcome.status is OutcomeStatus.UNKNOWN
            if known is None or known.status is OutcomeStatus.UNKNOWN or not says_nothing:
                found[key] = outcome
        return sorted(found.values(), key=lambda one: one.decided_ms or 0)

    def wait(
        self,
        start: Position,
        wanted: Collection[CancelledName],
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Mapping[CancelledName, Outcome]:
        """Wait for outcomes, and return those that came in time; the first one of each counts.

        ``start`` is the end of the topic before the cancellations were sent.
        """
        # A reader that starts at the symbolic end starts there again when its connection breaks,
        # and loses what was published meanwhile.
        left = set(wanted)
        found: dict[CancelledName, Outcome] = {}
        until_s = time.monotonic() + timeout_s
        # A client without the C++ core, such as the in-memory one, has nothing to wait for.
        waits = has_core(self._client)
        with self._in_client:
            reader = PartitionReader(self._client, self._partition.full, start)
        try:
            while left and not stopped():
                left_ms = int((until_s - time.monotonic()) * 1000)
                with self._in_client:
                    message = reader.receive(min(max(left_ms, 0), _POLL_MS) if waits else 0)
                if message is None:
                    if left_ms <= 0 or not waits:
                        break
                    continue
                outcome = _outcome(message.properties())
                if outcome is not None and outcome.name in left:
                    left.remove(outcome.name)
                    found[outcome.name] = outcome
        finally:
            with self._in_client:
                reader.close()
        return found


def _outcome(properties: Mapping[str, str]) -> Outcome | None:
    """Return the outcome in the properties of a record; None if it is not one."""
    try:
        return Outcome.read(properties)
    except EnvelopeError:
        return None
