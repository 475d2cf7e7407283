"""Random runs of a dispatcher's publishing: nothing is lost, and with deduplication no copies."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.publisher import KEY_BATCHED_SETTINGS
from delaylevel.cluster.targets.send_state import EntryOutcome
from support.publishing_runs import run_all, search_runs, step, too_big_is_alone  # noqa: F401
from support.seeds import SEARCH
from support.simulation import (
    TARGETS,
    BatchingProducer,
    Simulation,
)

# Examples of each search by day.
RUNS = 20


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("replacing", [False, True])
def test_nothing_is_lost_or_published_twice(numbered: bool, replacing: bool) -> None:
    search_runs(numbered, replacing, shrinking=True, count=RUNS)


def test_nothing_is_lost_or_published_twice_in_partitions() -> None:
    search_runs(True, False, shrinking=True, count=RUNS, partitions=2)


@pytest.mark.parametrize(("numbered", "partitions"), [(False, 0), (True, 0), (True, 2)])
def test_nothing_is_lost_or_published_twice_with_little_room(
    numbered: bool, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher.IN_FLIGHT_MESSAGES", 4)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._BATCH", 3)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._MANY_WAITING", 3)
    monkeypatch.setattr("delaylevel.dispatcher.pending._IN_MEMORY", 4)
    search_runs(numbered, False, shrinking=True, count=RUNS, partitions=partitions)


@pytest.mark.parametrize("numbered", [False, True])
def test_nothing_is_lost_or_published_twice_in_a_burst(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Intents of due messages are not waited for, and entries have few messages.
    monkeypatch.setattr("delaylevel.dispatcher.publishing.sending._MANY", 1)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._PREPARED", 4)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._BATCH", 3)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._MANY_WAITING", 3)
    small_entries(monkeypatch)
    search_runs(numbered, False, shrinking=True, count=RUNS)


def test_nothing_is_lost_with_a_client_that_ends_its_batches_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_entries(monkeypatch)
    batches_end_early(monkeypatch)
    search_runs(False, False, shrinking=True, count=RUNS)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_confirmation_of_another_entry_proves_nothing(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_entries(monkeypatch)
    batches_end_early(monkeypatch)
    if trusted:
        monkeypatch.setattr(EntryOutcome, "is_proven", lambda self, message_id: True)
    # The first two messages are stored, and the third one is in an entry that fails.
    actions = [("publish", 0, 3), ("store", 0, 1), ("confirm", 0, 1), ("fail", 0, 0)]
    with pytest.raises(AssertionError, match="id-2 is lost") if trusted else nullcontext():
        run_all(False, False, actions)


def batches_end_early(patch: pytest.MonkeyPatch) -> None:
    send = BatchingProducer.send_async

    def send_async(self: BatchingProducer, message: Any, callback: Any) -> None:
        send(self, message, callback)
        if message.data().endswith(b"1"):
            self.end_batch()

    patch.setattr(BatchingProducer, "send_async", send_async)


def small_entries(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(KEY_BATCHED_SETTINGS, "batching_max_messages", 3)


# -- a crash at every step of an intent that is ahead


class Share(random.Random):
    """Source of the least or the greatest numbers, instead of random ones."""

    def __init__(self, *, most: bool) -> None:
        super().__init__()
        self._most = most

    def randint(self, a: int, b: int) -> int:
        return b if self._most else a


def steps_of_an_intent(run: Simulation, stored: int) -> Iterator[str]:
    """Take the steps of an intent for four messages, of which the last one is never sent.

    Args:
        stored: number of messages that the target stores and confirms at each send.

    Yields:
        The name of the step that was taken.
    """

    def send(seconds: float) -> None:
        run.wait(seconds)
        run.publisher.process()
        run.publisher.send_due()

    run.send(4, TARGETS[0], too_big=False, due_in_ms=(160, 160, 210, 310))
    run.cycle()
    run.wait(0.115)
    run.cycle()
    assert run.publisher.planned == 4
    yield "the intent is written"
    run.journal.store(len(run.journal.tail))
    yield "the intent is confirmed"
    for seconds in (0.05, 0.05):
        send(seconds)
        yield "some messages are sent"
        for producer in run.broker.producers:
            producer.store(stored)
        yield "some of them are stored"
        for producer in run.broker.producers:
            producer.confirm(stored)
        yield "some of them are confirmed"
    run.send(1, TARGETS[0], too_big=False, due_in_ms=(40,))
    run.cycle()
    yield "the rest is withdrawn, or another intent is written"
    run.cycle()
    yield "the rest is planned again"
    run.journal.store(1)
    yield "one more record is confirmed"
    run.journal.store(len(run.journal.tail))
    yield "all records are confirmed"
    for producer in run.broker.producers:
        producer.store(len(producer.wire))
        producer.confirm(len(producer.answers))
    run.wait(0.3)
    run.publisher.process()
    yield "the commit is written"


@pytest.mark.parametrize("end", ["crash", "suspend", "hand over"])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_crash_at_every_step_of_an_intent_that_is_ahead(
    numbered: bool, end: str, tmp_path: Path
) -> None:
    taken = set()
    cases = list(product((0, 1, 2), (0, 1, 2), (False, True), range(13)))
    for stored, in_journal, most, last in cases[:: 1 if SEARCH > 1 else 5]:
        with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
            run = Simulation(numbered, Path(directory))
            run.send(1, TARGETS[0], too_big=False)
            for _ in range(10):  # open the producer, which is closed again after two seconds
                step(run, "run", 0, 0, False)
                run.wait(0.1)
                for producer in run.broker.producers:
                    producer.store(1)
                    producer.confirm(1)
            assert run.broker.topics[TARGETS[0]].delivered == ["id-0"]
            for number, name in enumerate(steps_of_an_intent(run, stored)):
                if number == last:
                    taken.add(name)
                    break
            share = Share(most=most)
            run.journal.store(in_journal)
            if end == "crash":
                run.takeover(share)
            elif end == "suspend":
                run.suspend(1.5, share)
            else:
                run.hand_over(1, share)
            run.settle()
            run.check()
    assert len(taken) == 10


def test_messages_keep_their_order_while_the_number_of_partitions_becomes_known(
    tmp_path: Path,
) -> None:
    run = Simulation(True, tmp_path)
    run.send(1, TARGETS[0], too_big=False)
    run.wait(0.02)
    run.cycle()  # it asks for the number
    run.send(1, TARGETS[0], too_big=False)
    run.wait(0.02)
    run.offer()
    run.publisher.publish_waiting()
    run.work()  # the answer comes between the messages that wait and the next ones
    batch = run.queue.advance(run.clock.now_ms())
    assert batch is not None
    run.publisher.publish(batch)
    run.settle()
    assert run.broker.topics[TARGETS[0]].delivered == ["id-0", "id-1"]


def test_two_copies_of_a_held_message_are_known_as_copies(tmp_path: Path) -> None:
    """A crash before the commit makes two copies; one of them may be held again meanwhile."""
    actions = ("fail", 0), ("publish", 2), ("publish", 0), ("takeover", 0), ("held", 0)
    actions += ("publish", 0), ("run", 0), ("publish", 0), ("takeover", 0)
    run_all(True, False, [(action, 0, amount) for action, amount in actions])
    run_all(True, False, [*((a, 0, n) for a, n in actions[:-1]), ("takeover", 0, 1)])


def turn(run: Simulation, seconds: float) -> None:
    """Let time pass, and the process work; targets that are served store and confirm all."""
    run.wait(seconds)
    run.work()
    run.cycle()
    for producer in list(run.broker.producers):
        producer.store(len(producer.wire))
        producer.confirm(len(producer.answers))
    run.cycle()


@pytest.mark.parametrize("numbered", [False, True])
def test_messages_wait_for_a_target_that_fails_over_and_delay_no_other(
    numbered: bool, tmp_path: Path
) -> None:
    run = Simulation(numbered, tmp_path)
    away, near = (run.broker.topics[target] for target in TARGETS)
    for target in TARGETS:
        run.send(1, target, too_big=False)
    for _ in range(6):
        turn(run, 0.5)
    run.lose(TARGETS[0], 0)
    for number in range(80):  # 40 s
        for target in TARGETS:
            run.send(1, target, too_big=False)
        turn(run, 0.25)
        turn(run, 0.25)
        assert len(near.delivered) == number + 2
    assert away.delivered == ["id-0"]
    run.fail_over()
    for _ in range(12):
        turn(run, 0.5)
    assert away.delivered == [f"id-{number}" for number in range(0, len(run.sent), 2)]
    assert run.description.held_topic.partition(0).full not in run.broker.topics
