"""Cancellations of a window partition, from the decision to the stored outcome.

The owner's thread calls everything here, and nothing here waits. For each cancellation, the order
is: records of the decision, a confirmation of the journal, the outcome in the outcomes topic, its
confirmation, and a Released record of the cancellation. A crash in between repeats the outcome.

An outcome without a record of its own follows a LowWatermark record. So an owner that was suspended
while another one took over reports nothing.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from functools import partial

import numpy as np

from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.scheduler import NEVER
from delaylevel.cluster.targets.send_state import NO_PAYLOAD
from delaylevel.dispatcher.delay_queue import UNCLEAR_MS, CancelRequest, DelayQueue
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.journal.records import pack_message
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.errors import DelayLevelError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.position import Position, SourcePartition
from delaylevel.mover.carrier import Carried
from delaylevel.mover.hop import Place, Placed

from .own_topics import OwnTopics

log = logging.getLogger(__name__)

#: Time after which outcomes are deleted. They are not compacted: that needs a policy or an
#: operator, and would keep an outcome of every ID for ever.
RETENTION_S = 24 * 3600
# Released records are gathered for so long, and up to this number of cancellations.
_ANSWER_S = 0.25
_ANSWERS = 2_000
# Beyond this number of outcomes that are not confirmed, further ones are decided again later.
_UNCONFIRMED = 20_000
_POSTPONED_MS = 5_000
# Number of these decisions per second.
_AGAIN_PER_S = 10_000
# Time between two looks at a journal that has to confirm, and at unanswered calls.
_LOOK_S = 0.001
_RETRY_S = 1.0
_EXPIRE_EVERY_S = 600.0


def expire_outcomes(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Delete old outcomes of a level topic."""
    admin.expire_messages(description.outcomes_topic.partition(0), SUBSCRIPTION, RETENTION_S)


class CancellationDesk:
    """The cancellations of one window partition."""

    def __init__(
        self,
        host: Host,
        delay_queue: DelayQueue,
        journal: Journal,
        outcomes: OwnTopics[CancelRequest],
        source: SourcePartition,
    ) -> None:
        self._host = host
        self._now_s = host.now_s
        self._queue = delay_queue
        self._cancelling = delay_queue.cancelling
        self._journal = journal
        self._topic = host.descriptions.latest().outcomes_topic.partition(0).full
        self._outcomes = outcomes
        # Decisions, each with the number of records that the journal has to confirm before.
        self._decided: deque[tuple[int, CancelRequest]] = deque()
        self._source = source
        self._end_warning = RepeatedWarning(log, source.topic)
        self._answered: list[int] = []
        self._answer_s = 0.0
        self._again_ms = 0  # no further decisions are postponed to an earlier time
        # The question for the last stored message, in the background: the times at which it was
        # asked, and the answer.
        self._asks = False
        self._proof: tuple[int, float, Position | None] | None = None
        self._ask_again_s = 0.0
        self._alone_s = host.now_s() + UNCLEAR_MS / 1000  # earlier owners have stopped then
        self._expire_s = host.now_s() + _EXPIRE_EVERY_S

    @property
    def is_deciding(self) -> bool:
        """True while a decision, its record or its outcome is on its way."""
        return bool(self._cancelling.undecided or self._decided or self._outcomes.owes_answers)

    @property
    def _unconfirmed(self) -> int:
        """Number of outcomes that are not confirmed."""
        return len(self._decided) + self._outcomes.load[0]

    @property
    def next_look_s(self) -> float | None:
        """Monotonic time of the next call of `process` without an event, in s, or None."""
        now_s = self._now_s()
        if self.is_deciding:
            return now_s + _LOOK_S
        if self._answered:
            return self._answer_s
        return now_s + _RETRY_S if self._unconfirmed or self._asks else None

    def process(self) -> None:
        """Decide, publish outcomes, and release cancellations whose outcomes are stored."""
        if self._cancelling.undecided:
            self._decide()
        if self._cancelling.proof_ms is not None or self._now_s() >= self._alone_s:
            self._prove()
            if self._cancelling.undecided:
                self._decide()
        if self._decided:
            self._send()
        for carried in self._outcomes.confirmed():
            decision = carried.item
            assert decision.outcome is not None
            if carried.reason:
                # It has the key twice, and would stay too large: its cancellation would keep the
                # window from being acknowledged for ever.
                log.warning(
                    "the outcome of a cancellation is too large to be stored: %s is %s",
                    decision.outcome.id,
                    decision.outcome.status,
                )
            self._host.stats.add(outcomes=Counter([decision.outcome.status.value]))
            if decision.position is not None:
                if not self._answered:
                    self._answer_s = self._now_s() + _ANSWER_S
                self._answered.append(decision.position)
        if self._answered and (self._now_s() >= self._answer_s or len(self._answered) >= _ANSWERS):
            self.write_answers()

    def finish(self) -> None:
        """Write what the next owner needs; errors as for `process`."""
        self.write_answers()
        self._close_reopened()

    def tidy_up(self) -> None:
        """Write records that are due from time to time, and delete old outcomes."""
        self._close_reopened()
        now_s = self._now_s()
        # All window partitions have one outcomes topic, so that one owner is enough.
        if self._source.partition == 0 and now_s >= self._expire_s:
            self._expire_s = now_s + _EXPIRE_EVERY_S
            self._host.start(self._expire_quietly)

    def write_answers(self) -> None:
        """Release the cancellations whose outcomes are stored; errors as for `process`."""
        if self._answered:
            positions = np.unique(np.array(self._answered, dtype=np.int64))
            self._answered = []
            self._journal.append_soon(self._cancelling.answered(positions))

    def _close_reopened(self) -> None:
        for record in self._queue.close_reopened():
            self._journal.append_soon(record)

    def _decide(self) -> None:
        records, decisions = self._cancelling.decide()
        # An owner that was suspended while another one took over must report nothing. It cannot
        # know that, but its record is not confirmed.
        if decisions and not records:
            records = [self._queue.state.proof]
        number = 0
        for record in records:
            number = self._journal.append_soon(record)
        room = max(_UNCONFIRMED - self._unconfirmed, 0)
        self._decided += ((number, decision) for decision in decisions[:room])
        if len(decisions) > room:
            self._postpone(decisions[room:])

    def _postpone(self, decisions: list[CancelRequest]) -> None:
        """Let decisions be made again, each of them about once."""
        at_ms = max(self._again_ms, self._host.clock.now_ms() + _POSTPONED_MS)
        for start in range(0, len(decisions), _AGAIN_PER_S):
            some = decisions[start : start + _AGAIN_PER_S]
            self._cancelling.postpone(some, at_ms)
            at_ms += len(some) * 1000 // _AGAIN_PER_S
        self._again_ms = at_ms

    def _send(self) -> None:
        """Send the outcomes that the journal allows."""
        while self._decided and self._decided[0][0] <= self._journal.stored:
            decision = self._decided.popleft()[1]
            outcome = decision.outcome
            assert outcome is not None
            record = NO_PAYLOAD._replace(key=outcome.id, value=outcome.payload())
            placed = Placed(Place("outcome", outcome.id, self._topic), outcome.properties())
            self._outcomes.put(Carried(decision, record, None, placed))
        self._outcomes.flush()

    def _prove(self) -> None:
        """Find out if all is read that was stored before the end of cancellations or owners."""
        now_ms, now_s = self._host.clock.now_ms(), self._now_s()
        proof_ms = self._cancelling.proof_ms
        is_time = now_s >= self._alone_s or (proof_ms is not None and now_ms >= proof_ms)
        if is_time and not self._asks and now_s >= self._ask_again_s:
            self._asks = True
            self._host.start(partial(self._ask, now_ms, now_s))
        if self._proof is not None:
            # Everything up to that message was stored before the question. What comes later
            # arrived after the end of the wait.
            asked_ms, asked_s, last = self._proof
            if last is None or self._queue.last_offered >= pack_message(last):
                self._proof, self._asks = None, False
                self._cancelling.everything_is_read(asked_ms)
                if asked_s >= self._alone_s:
                    self._alone_s = NEVER
                    self._cancelling.earlier_is_read()

    def _ask(self, now_ms: int, now_s: float) -> None:
        """Look for the last stored message, in a thread of its own."""
        try:
            self._proof = now_ms, now_s, self._host.admin.last_message_id(self._source.name)
            self._end_warning.over()
        except Exception as error:  # it is asked again
            self._end_warning.failed(f"its last message is not known: {error}")
            self._ask_again_s, self._asks = self._now_s() + _RETRY_S, False
        self._host.events.wake()

    def _expire_quietly(self) -> None:
        try:
            expire_outcomes(self._host.admin, self._host.descriptions.latest())
        except DelayLevelError as error:
            log.warning("old outcomes of cancellations could not be deleted: %s", error)
