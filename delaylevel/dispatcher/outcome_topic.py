"""The outcomes topic of a level topic: the outcomes of cancellations, published without waiting."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from delaylevel.cluster.background import Starter, in_thread
from delaylevel.cluster.own_producers import OwnProducers
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.outcome import Outcome, OutcomeStatus

from .cancellations import CancelDecision

log = logging.getLogger(__name__)

# Pause before outcomes that were not confirmed are sent again.
_RETRY_S = 1.0


#: Time after which outcomes are deleted. They are not compacted: that needs a policy or an
#: operator, and would keep an outcome of every ID for ever.
RETENTION_S = 24 * 3600


def expire_outcomes(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Delete old outcomes of a level topic.

    Raises:
        BrokerError: the broker refuses, or does not answer.
    """
    admin.expire_messages(description.outcomes_topic.partition(0), SUBSCRIPTION, RETENTION_S)


class _OutcomeRecord(NamedTuple):
    """A record of the outcomes topic."""

    value: bytes
    key: str
    properties: dict[str, str]
    ordering_key: str = ""
    event_ms: int = 0


def outcome_of(decision: CancelDecision) -> Outcome:
    """Return the outcome as applications see it."""
    cancellation = decision.cancellation
    return Outcome(
        OutcomeStatus(decision.outcome),
        cancellation.message_id,
        cancellation.target,
        cancellation.due_ms,
        decision.decided_ms,
        decision.released_ms,
        decision.reason,
        cancellation.key,
    )


class OutcomeTopic:
    """Publisher of outcomes. An outcome is published once the journal has confirmed its record.

    Args:
        client: a ``pulsar.Client`` for our own topics; it is not closed here.
        start, wake, now_s: as for :class:`~delaylevel.cluster.targets.producer.TargetProducer`.
    """

    def __init__(
        self,
        client: Any,
        description: Callable[[], LevelTopicDescription],
        *,
        start: Starter = in_thread,
        wake: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._topic = description().outcomes_topic.partition(0).full
        self._topics: OwnProducers[CancelDecision] = OwnProducers(
            client, "", start=start, wake=wake, now_s=now_s
        )
        self._now_s = now_s
        self._decided: deque[tuple[int, CancelDecision]] = deque()
        self._again: list[CancelDecision] = []
        self._again_s = 0.0
        self._warning = RepeatedWarning(log, self._topic)

    def __len__(self) -> int:
        """Return the number of outcomes that are not confirmed."""
        messages, _ = self._topics.load
        return len(self._decided) + len(self._again) + messages

    @property
    def waits_for_journal(self) -> bool:
        """True while outcomes wait for the journal."""
        return bool(self._decided)

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come."""
        return self._topics.owes_answers

    def add(self, decisions: Iterable[CancelDecision], record: int) -> None:
        """Add outcomes.

        Args:
            record: number of records that the journal has to have confirmed before.
        """
        self._decided += ((record, decision) for decision in decisions)

    def send(self, stored: int) -> None:
        """Send what the journal allows, and again what was not confirmed.

        Args:
            stored: number of records that the journal has confirmed.
        """
        ready: list[CancelDecision] = []
        if self._again and self._now_s() >= self._again_s:
            ready, self._again = self._again, []
        while self._decided and self._decided[0][0] <= stored:
            ready.append(self._decided.popleft()[1])
        for decision in ready:
            outcome = outcome_of(decision)
            record = _OutcomeRecord(outcome.payload(), outcome.id, outcome.properties())
            reason = self._topics.send(decision, self._topic, record, record.properties, None)
            if reason is not None:
                self._keep(decision, reason)
        if ready:
            self._topics.flush()

    def confirmed(self) -> Iterator[CancelDecision]:
        """Yield each outcome that the broker has stored since the last call."""
        for own in self._topics.poll():
            if own.outcome is SendOutcome.STORED:
                if not self._again:
                    self._warning.over()
                yield own.item
            else:
                self._keep(own.item, own.reason)

    def close(self) -> None:
        """Close the producer."""
        self._topics.close()

    def _keep(self, decision: CancelDecision, reason: str) -> None:
        """Keep an outcome that was not stored; `send` sends it again."""
        self._warning.failed(f"outcomes of cancellations were not stored ({reason}): tried again")
        self._again.append(decision)
        self._again_s = self._now_s() + _RETRY_S
