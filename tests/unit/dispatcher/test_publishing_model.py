"""Random runs of a dispatcher's publishing: nothing is lost, and with deduplication no copies."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pulsar
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from delaylevel.cluster.publisher import KEY_BATCHED_SETTINGS
from delaylevel.cluster.targets import send_state
from delaylevel.dispatcher.journal import state as journal_state
from delaylevel.dispatcher.publishing.publisher import TargetState
from delaylevel.dispatcher.record import WindowMessage
from delaylevel.model.level_topic import ALL, Expired
from support.seeds import examples
from support.simulation import TARGETS, TOO_BIG, Producer, Simulation, target_of

# Examples of each search by day.
RUNS = 30
ACTIONS = (
    "publish", "publish", "publish", "send", "cycle", "work", "run", "run", "store", "store",
    "confirm", "fail", "refuse", "accept", "forget", "replace", "takeover", "takeover", "wait",
    "own", "held", "own fails", "disk", "ahead", "ahead", "ahead", "soon", "turn", "turn",
    "turn", "journal", "crash", "suspend", "race", "race", "hand over", "hand over",
    "cancel", "cancel", "cancel early", "cancel wrong", "cancel and takeover",
    "copy", "copy", "again",
    "lose", "lose", "fail over", "reconnect", "pass time",
    "expiring", "expiring", "pause", "pause all", "resume", "resume", "spread",
)  # fmt: skip
TAKEOVERS = (
    "takeover", "hand over", "suspend", "race", "cancel and takeover", "crash", "own fails",
)  # fmt: skip


@pytest.fixture(autouse=True)
def too_big_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages that are too large share no entry, as those above the client's limit."""
    monkeypatch.setitem(
        KEY_BATCHED_SETTINGS, "batching_max_allowed_size_in_bytes", len(TOO_BIG) - 1
    )
    monkeypatch.setattr(journal_state, "_CHUNK_BYTES", 300)


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
    rng = random.Random(amount)
    simple: dict[str, Callable[[], object]] = {
        "send": lambda: run.send(amount, target, too_big=amount == 1),
        "work": run.work,
        "wait": lambda: run.wait(amount),
        "own": run.own_topics_answer,
        "run": run.progress,
        "held": run.bring_back,
        "reconnect": run.reconnect,
        "journal": lambda: run.journal.store(amount),
        "pause": lambda: run.pause(target),
        "pause all": run.pause,
        "resume": lambda: run.resume(ALL if amount % 2 else target),
        "spread": lambda: run.resume(
            ALL if amount % 2 else target, (100, 1_000, 3_000)[amount % 3]
        ),
        "takeover": lambda: run.takeover(rng),
        "hand over": lambda: run.hand_over(amount // 2, rng),
        "suspend": lambda: run.suspend(0.2 + 0.4 * amount, rng),
        "own fails": lambda: run.fail_own_topics(amount),
    }
    if run.replaced and action in TAKEOVERS:
        return  # a new process does not know that a topic was deleted just now
    if action in simple:
        simple[action]()
    elif action == "publish":
        run.send(amount, target, too_big=amount == 1)
        run.turn_several(3)
    elif action == "cycle":
        run.wait(0.02)
        run.cycle()
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
    elif action in ("refuse", "accept"):
        topic.refuses = action == "refuse"
    elif action == "lose":
        # The broker of the target dies, perhaps while messages are sent to it.
        run.send(amount // 2, target, too_big=False)
        run.turn_several(3)
        run.lose(target, amount)
        run.turn_several(3)
    elif action == "fail over":
        run.fail_over()
        run.turn_several(amount)
    elif action == "pass time":
        # Until producers without a connection are replaced, or their target is refused.
        for _ in range(8 * (amount + 1)):
            run.wait(0.9)
            run.work()
            run.cycle()
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
    elif action == "disk":
        run.disk_full = not run.disk_full
    elif action == "ahead":
        # Some of them are sent, and the others follow.
        run.send(amount, target, too_big=False, due_in_ms=(250, 60, 120))
        run.turn_several(3)
    elif action == "soon":
        # They are due before messages that arrived earlier, and the journal is slow.
        run.send(amount, target, too_big=amount == 1, due_in_ms=(30, 15, 100))
        run.cycle()
        run.wait(0.02)
        run.cycle()
    elif action == "turn":
        run.wait(0.01 * amount)
        run.work()
        run.cycle()
    elif action == "crash":
        run.journal.fails_after = amount
    elif action == "race":
        # A crash just after messages were sent, if their intent was confirmed so soon.
        run.send(2, target, too_big=False, due_in_ms=(15, 100))
        run.cycle()
        run.journal.store(amount // 4)
        run.wait(0.02)
        run.cycle()
        run.takeover(rng, worst=True)
    elif action == "cancel":
        run.cancel(max(len(run.sent) - 1 - amount // 2, 0), target)
        if amount % 2:
            run.cycle()
    elif action == "cancel early":
        run.cancel(len(run.sent), target)
        run.cycle()
        if amount:  # otherwise it never comes, or with a later name
            run.send(1, target, too_big=False, due_in_ms=(10 + 50 * amount,))
    elif action == "cancel wrong":
        # Its due time is not that of the message, and its end comes earlier or later.
        run.cancel(max(len(run.sent) - 1 - amount, 0), target, (-3_000, 3_000)[amount % 2])
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
        run.takeover(rng)
    elif action == "copy":
        originals = [each for each in run.window if isinstance(each, WindowMessage)]
        if originals:
            run.window += [originals[-1 - amount % len(originals)]] * (1 + amount % 2)
            run.cycle()
    elif action == "again":
        # The reader connects again, and reads some messages once more.
        run.offered = max(run.offered - 3 * amount, 0)
        run.cycle()
    elif action == "clock":
        # Another machine takes over, whose clock is wrong by some time.
        run.clocks_differ = True
        run.clock.ahead_ms = 10_000 * (amount - 3)
        run.takeover(rng, worst=which == 1)
    elif action == "expiring":
        run.send(amount, target, False, "", (10, 250), (30, 200, 1_000, 60_000))
        run.cycle()
    else:
        raise AssertionError(f"there is no action {action}")


def run_all(
    numbered: bool,
    replacing: bool,
    actions: list[tuple[str, int, int]],
    partitions: int = 0,
) -> Simulation:
    send_state._mistakes = 0
    with tempfile.TemporaryDirectory() as directory:
        run = Simulation(numbered, Path(directory), partitions)
        policy = list(Expired)[len(actions) % 2]
        default_ms = (0, 0, 800)[len(actions) % 3]
        # Some have the ID that a position gives them.
        run.name = lambda number: f"levels:7:{number}:0" if number % 3 == 0 else f"id-{number}"
        run.description = replace(run.description, expired=policy, expire_after_ms=default_ms)
        for action, which, amount in actions:
            step(run, action, which, amount, replacing)
        run.resume()
        run.settle()
        run.check()
    return run


def search_runs(
    numbered: bool, replacing: bool, partitions: int = 0, actions: tuple[str, ...] = ACTIONS
) -> None:
    @examples(
        RUNS,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(steps(actions))
    def search(actions: list[tuple[str, int, int]]) -> None:
        run_all(numbered, replacing, actions, partitions)

    search()


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("replacing", [False, True])
def test_nothing_is_lost_or_published_twice(numbered: bool, replacing: bool) -> None:
    search_runs(numbered, replacing)


@pytest.mark.parametrize("numbered", [False, True])
def test_nothing_is_lost_or_published_twice_in_partitions(numbered: bool) -> None:
    search_runs(numbered, False, partitions=2)


@pytest.mark.parametrize("numbered", [False, True])
def test_no_cancelled_message_is_forgotten_while_it_is_pending(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = journal_state.CancelledIds.__init__
    monkeypatch.setattr(journal_state.CancelledIds, "__init__", lambda self, _: create(self, 2))
    # Copies are recognized by these IDs, too, and a copy is forgotten with them.
    actions = tuple(action for action in ACTIONS if action != "copy")
    search_runs(numbered, False, actions=actions + ("cancel", "cancel and takeover") * 4)


@pytest.mark.parametrize("numbered", [False, True])
def test_no_cancelled_message_is_published_whatever_the_clocks_say(numbered: bool) -> None:
    more = ("clock", "cancel", "cancel and takeover", "publish", "store") * 3
    search_runs(numbered, False, actions=ACTIONS + more)


def test_the_runs_reach_everything() -> None:
    expired, found = 0, Counter[str]()
    for seed in range(40):
        rng = random.Random(seed)
        chosen = rng.choices(ACTIONS, k=rng.randint(8, 60))
        actions = [(each, rng.randint(0, 1), rng.randint(0, 7)) for each in chosen]
        run = run_all(seed % 2 == 0, False, actions)
        expired += len(run.expired)
        found.update(each for outcomes in run.outcomes().values() for each in outcomes)
    assert expired > 25
    assert min(found["cancelled"], found["too late"], found["unknown"]) > 2, found


@pytest.mark.parametrize(("numbered", "partitions"), [(False, 0), (True, 0), (True, 2)])
def test_nothing_is_lost_or_published_twice_with_little_room(
    numbered: bool, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.publishing.in_flight.IN_FLIGHT_MESSAGES", 4)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._BATCH", 3)
    monkeypatch.setattr(TargetState.OPENING, "stops_from", 3)
    monkeypatch.setattr("delaylevel.dispatcher.pending._IN_MEMORY", 4)
    search_runs(numbered, False, partitions=partitions)


@pytest.mark.parametrize("numbered", [False, True])
def test_nothing_is_lost_or_published_twice_in_a_burst(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Intents of due messages are not waited for, and entries have few messages.
    monkeypatch.setattr("delaylevel.dispatcher.publishing.in_flight._MANY", 1)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._PREPARED", 4)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._BATCH", 3)
    monkeypatch.setattr(TargetState.OPENING, "stops_from", 3)
    monkeypatch.setitem(KEY_BATCHED_SETTINGS, "batching_max_messages", 3)
    search_runs(numbered, False)


# -- examples


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
    actions = [("fail", 0), ("publish", 2), ("publish", 0), ("takeover", 0), ("held", 0)]
    actions += ("publish", 0), ("run", 0), ("publish", 0), ("takeover", 0)
    run_all(True, False, [(action, 0, amount) for action, amount in actions])
    run_all(True, False, [*((a, 0, n) for a, n in actions[:-1]), ("takeover", 0, 1)])


@pytest.mark.parametrize("numbered", [False, True])
def test_messages_wait_for_a_target_that_fails_over_and_delay_no_other(
    numbered: bool, tmp_path: Path
) -> None:
    run = Simulation(numbered, tmp_path)
    away, near = (run.broker.topics[target] for target in TARGETS)
    for target in TARGETS:
        run.send(1, target, too_big=False)
    run.rounds(6, 0.5)
    run.lose(TARGETS[0], 0)
    for number in range(80):  # 40 s
        for target in TARGETS:
            run.send(1, target, too_big=False)
        run.round(0.25)
        run.round(0.25)
        assert len(near.delivered) == number + 2
    assert away.delivered == ["id-0"]
    run.fail_over()
    run.rounds(12, 0.5)
    assert away.delivered == [f"id-{number}" for number in range(0, len(run.sent), 2)]
    assert run.description.held_topic.partition(0).full not in run.broker.topics
