"""The random runs with cancellations find planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.cancelling.decisions import Cancellations
from delaylevel.dispatcher.cancelling.queue import CancellationQueue
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal import state
from delaylevel.dispatcher.record import (
    DueBatch,
)
from support.cancellation_runs import RARE, World, run


@contextmanager
def an_outcome_precedes_its_record(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(World, "written", 0)
    yield


@contextmanager
def earlier_intents_are_closed_at_once(patch: pytest.MonkeyPatch) -> Iterator[None]:
    def reopen(self: DelayQueue, number: int) -> None:
        self.resolve(number, np.zeros(self.state.open_intents[number].ids.size, dtype=np.bool_))

    patch.setattr(DelayQueue, "reopen", reopen)
    yield


@contextmanager
def intents_that_were_closed_before_the_first_record_do_not_matter(
    patch: pytest.MonkeyPatch,
) -> Iterator[None]:
    patch.setattr(Cancellations, "_find_unclear_until_ms", lambda self, now_ms: 0)
    yield


@contextmanager
def blocked_batches_are_not_filtered(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(DelayQueue, "without_cancelled", lambda self, batch: batch)
    patch.setattr(CancellationQueue, "has_cancelled", lambda self, intent: False)
    yield


@contextmanager
def waiting_messages_are_not_filtered(patch: pytest.MonkeyPatch) -> Iterator[None]:
    def advance_waiting(self: DelayQueue, target: TargetKey, most: int) -> DueBatch:
        return self._in_flight.put(*self.waiting.take(target, most))

    patch.setattr(DelayQueue, "advance_waiting", advance_waiting)
    patch.setattr(CancellationQueue, "has_cancelled", lambda self, intent: False)
    yield


@contextmanager
def open_intents_do_not_matter(patch: pytest.MonkeyPatch) -> Iterator[None]:
    nothing = lambda self, keys, key_index, ids: np.zeros(ids.size, dtype=np.bool_)  # noqa: E731
    patch.setattr(Cancellations, "_intended", nothing)
    patch.setattr(CancellationQueue, "has_cancelled", lambda self, intent: False)
    yield


@contextmanager
def held_messages_count_as_released(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(state.Dispositions, "kinds_of", lambda self, keys, key_index, ids: {})
    yield


@contextmanager
def nothing_is_known_of_the_time_before_the_first_record(
    patch: pytest.MonkeyPatch,
) -> Iterator[None]:
    create = state.Dispositions.__init__

    def forgetful(self: state.Dispositions, capacity: int, earlier: Any, *more: Any) -> None:
        create(self, capacity, type(earlier)(capacity), *more)

    patch.setattr(state.Dispositions, "__init__", forgetful)
    yield


@contextmanager
def unread_messages_count_as_missing(patch: pytest.MonkeyPatch) -> Iterator[None]:
    decide = CancellationQueue.decide

    def hasty(self: CancellationQueue) -> Any:
        self.everything_is_read(self._clock.now_ms())
        return decide(self)

    patch.setattr(CancellationQueue, "decide", hasty)
    yield


@contextmanager
def cancelled_messages_are_forgotten_soon(patch: pytest.MonkeyPatch) -> Iterator[None]:
    add = state.CancelledIds.add

    def forgetful(self: state.CancelledIds, record: Any, low_watermark: int) -> None:
        self._half = 1
        add(self, record, 1 << 62)

    patch.setattr(state.CancelledIds, "add", forgetful)
    yield


@contextmanager
def the_end_of_an_intent_decides_nothing(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(Cancellations, "decide_again", lambda self, keys, key_index, ids: None)
    yield


@pytest.mark.parametrize(
    "fault",
    [
        an_outcome_precedes_its_record,
        earlier_intents_are_closed_at_once,
        intents_that_were_closed_before_the_first_record_do_not_matter,
        blocked_batches_are_not_filtered,
        waiting_messages_are_not_filtered,
        open_intents_do_not_matter,
        held_messages_count_as_released,
        nothing_is_known_of_the_time_before_the_first_record,
        unread_messages_count_as_missing,
        cancelled_messages_are_forgotten_soon,
        the_end_of_an_intent_decides_nothing,
    ],
)
def test_the_runs_find(fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def search() -> None:
        for seed in (RARE, *range(300)):
            run(seed, False, tmp_path / str(seed))

    with fault(monkeypatch), pytest.raises(AssertionError):
        search()
