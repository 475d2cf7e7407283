"""Random runs of a dispatcher's publishing, in a simulation."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pulsar
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from delaylevel.cluster.publisher import KEY_BATCHED_SETTINGS
from delaylevel.cluster.targets import send_state
from support.seeds import examples
from support.simulation import (
    TARGETS,
    TOO_BIG,
    Producer,
    Simulation,
    target_of,
)

ACTIONS = (
    "publish", "publish", "publish", "send", "cycle", "work", "run", "run", "store", "store",
    "confirm", "fail", "refuse", "accept", "forget", "replace", "takeover", "takeover", "wait",
    "own", "held", "own fails", "disk", "ahead", "ahead", "ahead", "soon", "turn", "turn",
    "turn", "journal", "crash", "suspend", "race", "race", "hand over", "hand over",
    "cut", "cancel", "cancel", "cancel early", "cancel and takeover",
    "lose", "lose", "fail over", "reconnect", "pass time",
)  # fmt: skip


@pytest.fixture(autouse=True)
def too_big_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages that are too large share no entry, as those above the client's limit."""
    monkeypatch.setitem(
        KEY_BATCHED_SETTINGS, "batching_max_allowed_size_in_bytes", len(TOO_BIG) - 1
    )


def steps(actions: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(
        st.tuples(st.sampled_from(actions), st.integers(0, 1), st.integers(0, 7)),
        min_size=8,
        max_size=60,
    )


def step(run: Simulation, action: str, which: int, amount: int, replacing: bool) -> None:
    target = TARGETS[which]
    topic = run.broker.topics[target]
    producers: list[Producer] = [
        each for each in run.broker.producers if target_of(each.topic.name) == target
    ]
    if action == "send":
        run.send(amount, target, too_big=amount == 1)
    elif action == "publish":
        run.send(amount, target, too_big=amount == 1)
        for _ in range(3):
            run.work()
            run.wait(0.02)
            run.cycle()
    elif action == "run":
        run.work()
        run.cycle()
        run.own_topics_answer()
    elif action == "cycle":
        run.wait(0.02)
        run.cycle()
    elif action == "work":
        run.work()
    elif action == "store":
        for producer in producers:
            producer.store(amount)
    elif action == "confirm":
        for producer in producers:
            producer.confirm(amount)
    elif action == "fail":
        # A broken connection, and a topic that takes no producer at the reconnect.
        for producer in producers:
            producer.store(amount)
            producer.fail(pulsar.Result.ProducerBlockedQuotaExceededException)
        topic.refuses = True
    elif action == "refuse":
        topic.refuses = True
    elif action == "lose":
        # The broker of the target dies, perhaps while messages are sent to it.
        run.send(amount // 2, target, too_big=False)
        run.turn_several(3)
        run.lose(target, amount)
        run.turn_several(3)
    elif action == "fail over":
        run.fail_over()
        run.turn_several(amount)
    elif action == "reconnect":
        run.reconnect()
    elif action == "pass time":
        # Until producers without a connection are replaced, or their target is refused.
        for _ in range(8 * (amount + 1)):
            run.wait(0.9)
            run.work()
            run.cycle()
    elif action == "accept":
        topic.refuses = False
    elif action == "forget":
        # The broker forgets producers that have been away for hours; none of their messages is
        # without an outcome then.
        if not (producers or run.publisher.busy or run.journal.tail):
            for each in run.broker.every_topic:
                if target_of(each.name) == target:
                    each.last.clear()
    elif action == "replace":
        if replacing:
            run.own_topics_answer()
            run.replace(target)
    elif action == "takeover":
        # A new process does not know that a topic was deleted just now.
        if not run.replaced:
            run.takeover(random.Random(amount))
    elif action == "wait":
        run.wait(amount)
    elif action == "own":
        run.own_topics_answer()
    elif action == "own fails":
        # A process that starts again does not know that a topic was deleted just now.
        if not run.replaced:
            run.fail_own_topics(amount)
    elif action == "disk":
        run.disk_full = not run.disk_full
    elif action == "ahead":
        # Most of them are planned, some are sent, and the others follow.
        run.send(amount, target, too_big=False, due_in_ms=(250, 60, 120))
        for _ in range(3):
            run.work()
            run.wait(0.02)
            run.cycle()
    elif action == "soon":
        # They are due before messages that are planned, and the journal is slow.
        run.send(amount, target, too_big=amount == 1, due_in_ms=(30, 15, 100))
        run.cycle()
        run.wait(0.02)
        run.cycle()
    elif action == "cut":
        # A message arrives that is due before the rest of an intent of which some is stored.
        run.send(3, target, too_big=False, due_in_ms=(20, 200, 250))
        run.cycle()
        run.work()
        run.wait(0.03)
        run.cycle()
        for producer in producers:
            producer.store(amount)
            producer.confirm(amount)
        run.send(1, target, too_big=False, due_in_ms=(50,))
        run.cycle()
    elif action == "turn":
        run.wait(0.01 * amount)
        run.work()
        run.cycle()
    elif action == "journal":
        run.journal.store(amount)
    elif action == "crash":
        if not run.replaced:
            run.journal.fails_after = amount
    elif action == "race":
        # A crash just after planned messages were sent, if the intent was confirmed so soon.
        run.send(2, target, too_big=False, due_in_ms=(15, 100))
        run.cycle()
        run.journal.store(amount // 4)
        run.wait(0.02)
        run.cycle()
        if not run.replaced:
            run.takeover(random.Random(amount), worst=True)
    elif action == "suspend":
        if not run.replaced:
            run.suspend(1.5 + amount, random.Random(amount))
    elif action == "hand over":
        if not run.replaced:
            run.hand_over(amount // 2, random.Random(amount))
    elif action == "cancel":
        run.cancel(max(len(run.sent) - 1 - amount // 2, 0), target)
        if amount % 2:
            run.cycle()
    elif action == "cancel early":
        run.cancel(len(run.sent), target)
        run.cycle()
        run.send(1, target, too_big=False, due_in_ms=(10 + 50 * amount,))
    elif action == "cancel and takeover":
        run.send(2, target, too_big=False, due_in_ms=(1_000, 250))
        for number in (len(run.sent) - 1, len(run.sent) - 2):
            run.cancel(number, target)
            run.cycle()
            if number % 2:
                run.work()
            run.cycle()
            run.own_topics_answer()
        run.journal.store(amount // 4)
        if not run.replaced:
            run.takeover(random.Random(amount))
    elif action == "held":
        run.bring_back()


def run_all(
    numbered: bool,
    replacing: bool,
    actions: list[tuple[str, int, int]],
    partitions: int = 0,
) -> None:
    send_state._mistakes = 0
    with tempfile.TemporaryDirectory() as directory:
        run = Simulation(numbered, Path(directory), partitions)
        for action, which, amount in actions:
            step(run, action, which, amount, replacing)
        run.settle()
        run.check()


def search_runs(
    numbered: bool,
    replacing: bool,
    *,
    shrinking: bool,
    count: int,
    partitions: int = 0,
) -> None:
    @examples(
        count,
        phases=[Phase.generate, *([Phase.shrink] if shrinking else [])],
        suppress_health_check=list(HealthCheck),
    )
    @given(steps(ACTIONS))
    def search(actions: list[tuple[str, int, int]]) -> None:
        run_all(numbered, replacing, actions, partitions)

    search()
