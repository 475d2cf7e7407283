"""The search of test_publishing_model finds planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.cluster.targets.send_state import SendOutcome, SendState
from delaylevel.dispatcher.cancelling.decisions import Cancellations
from delaylevel.dispatcher.cancelling.desk import OutcomeTopic
from delaylevel.dispatcher.cancelling.queue import CancellationQueue
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import Refused
from delaylevel.dispatcher.publishing.outcomes import FlightOutcomes
from delaylevel.dispatcher.publishing.publisher import PlanCuts
from delaylevel.dispatcher.publishing.sending import Flight, FlightSender
from support.publishing_runs import search_runs, too_big_is_alone  # noqa: F401
from support.simulation import (
    SimulatedJournal,
)

# -- the search finds each of these faults


@contextmanager
def a_refusal_at_a_takeover_means_nothing_is_stored(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(SendState, "refuse_unsent", SendState.gone)
    yield


@contextmanager
def a_failure_in_flight_means_it_is_not_stored(patch: pytest.MonkeyPatch) -> Iterator[None]:
    def failed(self: SendState[Any], reason: str) -> None:
        self._settle([self.in_flight.popleft()], SendOutcome.REFUSED, reason)

    patch.setattr(SendState, "failed", failed)
    yield


@contextmanager
def refusals_are_not_recorded(patch: pytest.MonkeyPatch) -> Iterator[None]:
    nothing = Refused(np.empty(0, dtype=np.int64))
    patch.setattr(DelayQueue, "refuse", lambda self, positions: nothing)
    yield


@contextmanager
def messages_are_sent_before_their_intent_is_confirmed(
    patch: pytest.MonkeyPatch,
) -> Iterator[None]:
    append_soon = SimulatedJournal.append_soon
    patch.setattr(
        SimulatedJournal, "append_soon", lambda self, record: append_soon(self, record) and 0
    )
    yield


@contextmanager
def planned_messages_are_sent_when_they_are_planned(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(Flight, "due_until", lambda self, now_ms: len(self.batch))
    patch.setattr(Flight, "next_due_ms", 0)
    yield


@contextmanager
def late_arrivals_overtake_planned_messages(patch: pytest.MonkeyPatch) -> Iterator[None]:
    send = FlightSender._send_target

    def latest_first(
        self: FlightSender, key: TargetKey, flights: list[Flight], now_ms: int
    ) -> bool:
        return send(self, key, flights[::-1], now_ms)

    patch.setattr(FlightSender, "_send_target", latest_first)
    patch.setattr(PlanCuts, "is_behind", lambda self, batch, key: False)
    yield


@contextmanager
def messages_of_a_cut_intent_count_as_stored(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(Flight, "stored", lambda self: np.ones(len(self.batch), dtype=np.bool_))
    yield


@contextmanager
def messages_of_a_cut_intent_count_as_not_stored(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(Flight, "stored", lambda self: np.zeros(len(self.batch), dtype=np.bool_))
    yield


@contextmanager
def a_cut_intent_is_closed_before_its_messages_have_outcomes(
    patch: pytest.MonkeyPatch,
) -> Iterator[None]:
    withdraw = FlightOutcomes.withdraw

    def at_once(self: FlightOutcomes, flights: Any) -> None:
        for flight in flights:
            flight.left = 0
        withdraw(self, flights)

    patch.setattr(FlightOutcomes, "withdraw", at_once)
    yield


@contextmanager
def a_suspended_process_sends_what_it_had_planned(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(FlightSender, "_prove", lambda self: None)
    yield


@contextmanager
def messages_of_a_lost_producer_count_as_stored(patch: pytest.MonkeyPatch) -> Iterator[None]:
    def lost(self: SendState[Any]) -> None:
        self.is_open = False
        self._settle_all(self.in_flight, SendOutcome.STORED, "")

    patch.setattr(SendState, "lost", lost)
    yield


@pytest.mark.parametrize(
    "fault",
    [
        messages_are_sent_before_their_intent_is_confirmed,
        planned_messages_are_sent_when_they_are_planned,
        late_arrivals_overtake_planned_messages,
        messages_of_a_cut_intent_count_as_stored,
        messages_of_a_cut_intent_count_as_not_stored,
        a_cut_intent_is_closed_before_its_messages_have_outcomes,
        a_suspended_process_sends_what_it_had_planned,
        a_refusal_at_a_takeover_means_nothing_is_stored,
        a_failure_in_flight_means_it_is_not_stored,
        refusals_are_not_recorded,
        messages_of_a_lost_producer_count_as_stored,
    ],
)
def test_the_search_finds(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fault(monkeypatch), pytest.raises(AssertionError):
        search_runs(True, False, shrinking=False, count=2_000)


@contextmanager
def cancelled_messages_are_published(patch: pytest.MonkeyPatch) -> Iterator[None]:
    drop = CancellationQueue.filter

    def keep(self: CancellationQueue, columns: Any) -> Any:
        revoked, self._cancellations.revoked = self._cancellations.revoked, 0
        found = drop(self, columns)
        self._cancellations.revoked = revoked
        return found

    patch.setattr(CancellationQueue, "filter", keep)
    patch.setattr(CancellationQueue, "has_cancelled", lambda self, intent: False)
    yield


@contextmanager
def outcomes_precede_their_records(patch: pytest.MonkeyPatch) -> Iterator[None]:
    send = OutcomeTopic.send
    patch.setattr(OutcomeTopic, "send", lambda self, stored: send(self, 1 << 62))
    yield


@contextmanager
def messages_in_open_intents_are_cancelled(patch: pytest.MonkeyPatch) -> Iterator[None]:
    nothing = lambda self, keys, key_index, ids: np.zeros(ids.size, dtype=np.bool_)  # noqa: E731
    patch.setattr(Cancellations, "_intended", nothing)
    yield


@pytest.mark.parametrize(
    "fault",
    [
        cancelled_messages_are_published,
        outcomes_precede_their_records,
        messages_in_open_intents_are_cancelled,
    ],
)
def test_the_search_finds_false_outcomes(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fault(monkeypatch), pytest.raises((AssertionError, ValueError)):
        search_runs(False, False, shrinking=False, count=2_000)
