"""Tests of one message at which two features meet: a table in which every pair has a row.

A story is about one message, and told in steps. A step is a method of `Story`, or one of `STEPS`;
``3d`` lets that time pass while everything runs, and ``away:3d`` while neither mover nor dispatcher
does. All of it is the product, on the in-memory Pulsar and by its clock; no message may ever be
early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest

from delaylevel import Levels, Listeners, Outcome, PartitionBy, PartitionStrategy, Receipt, topics
from delaylevel.changes import pending_rows, receipts_of
from delaylevel.consumer import Backoff, Reject, Retry
from delaylevel.consumer.retry_topics import find_dead_letters
from delaylevel.dispatcher.publishing import outcomes
from delaylevel.errors import ConflictError, InvalidInputError
from delaylevel.inspection import Inspector, Selection
from delaylevel.model import envelope as env
from delaylevel.model.formatting import parse_delay
from delaylevel.model.level_topic import Expired, FinalWindow, LevelTopicDescription, MissingTarget
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.dead_letters import replay
from delaylevel.mover.drain import drain
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.lifecycle import change_settings, pause, resume

FEATURES = (
    *("retry", "held", "replayed", "rescheduled", "cancelled"),
    *("expired", "paused", "spread", "drained"),
)
ORDERS = "persistent://public/default/orders"
RETRY = f"{ORDERS}-billing-RETRY"
FAR, HOUR = timedelta(days=3), timedelta(hours=1)
FAR_MS = FAR // timedelta(milliseconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=30))])
#: For each pair, with its rule: stories, and their ends. An end is the number of times that the
#: message reached its topic (for a retry: that the listener handled it), then `letter` if it is a
#: dead letter, and the outcome of its cancellation. `broker:` is the other final window.
TABLE = """
retry held: a retry waits for its topic; it is never dropped, but a dead letter if that is gone
    retry gone 3d1m back 1h                             1
    dropping retry gone 3d1m back 1h                    0 letter
retry replayed: a replay is a new first attempt
    rejected replay 1m                                  1
retry rescheduled: a retry that gets another time is an attempt of the same message
    retry reschedule 9d                                 1 cancelled
    retry fire 9d                                       1 cancelled
retry cancelled: whoever cancels a retry wants no other attempt
    retry cancel 9d                                     0 cancelled
retry expired: no default ever applies to a retry, whatever happens to it
    retry expiry away:9d 1m                             1
    expiry retry away:9d 1m                             1
    expiry retry_at_once 1m                             1
    broker: retry expiry away:9d 1m                     1
    rejected expiry replay away:9d 1m                   1
    retry expiry reschedule away:9d 1m                  1 cancelled
    retry expiry gone away:3d1m 2h back 1h              1
retry paused: it waits, as all messages do, while its own topic is paused; it does not expire then
    retry pause_orders 3d1m                             1
    retry expiry pause 9d resume 1m                     1
retry spread: it leaves in its turn
    retry pause 9d spread 1h1m                          1
retry drained: it waits in the window until it is due
    retry drain 3d1m                                    1
held replayed: a replayed message is held, too
    letter gone replay 1m back 1h                       1
held rescheduled: a held message cannot be cancelled, and the outcome says so: both are delivered
    send gone 3d1m reschedule back 9d                   2 unknown: held
held cancelled: the cancellation has no effect, and says so, also if the message is back
    send gone 3d1m cancel back 1h                       1 unknown: held
    send gone 3d1m back away:1m drain cancel 1h         1 unknown: held
    send cancel gone 3d1m back 1h                       0 cancelled
held expired: it expires when it is back, or becomes a dead letter
    short gone 3d1m 2h back 1h                          0
    dead_letters short gone 3d1m 2h back 1h             0 letter
    broker: short gone 3d1m 2h back 1h                  0
held paused: it waits in the window
    send gone 3d1m pause back 1h resume 1m              1
held spread: it leaves in its turn
    send gone 3d1m pause back 1h spread 1h1m            1
held drained: a drain tries held messages, too; one is held again if that fails
    send gone 3d1m back drain 1m                        1
    send gone 3d1m drain back 1h                        1
replayed rescheduled: a replayed message is like any other; a dead letter cannot be cancelled
    letter replay_later reschedule 9d                   1 cancelled
    letter reschedule 5m replay 9d                      2 unknown: missing
replayed cancelled: the same; a replayed one that was held before cannot be cancelled either
    letter replay_later cancel 9d                       0 cancelled
    letter cancel 5m replay 1m                          1 unknown: missing
    dead_letters short gone 3d1m 2h back 1h replay_later cancel 9d  1 unknown: held
replayed expired: a replay is an order, also against the default and a later one; its own end counts
    dead_letters short away:9d 1m replay 1m             1
    short_letter 2h replay 1m                           1
    letter expiry 2h replay 1m                          1
    letter replay_later expiry away:9d 1m               1
    short_letter replay_later away:9d 1m                1
    broker: dead_letters short away:9d 1m replay 1m     1
replayed paused: it waits in the window
    letter pause replay 1h resume 1m                    1
replayed spread: it leaves in its turn
    letter pause replay 1h spread 1h1m                  1
replayed drained: it waits in the window; a drain leaves dead letters alone
    letter replay_later drain 3d1m                      1
    letter drain replay 1m                              1
rescheduled cancelled: the new message can be cancelled; a cancelled one can be replaced
    send reschedule cancel 9d                           0 cancelled
    send cancel reschedule 9d                           1 cancelled
    send later_copy cancel 9d                           0 cancelled
    send later_copy reschedule 9d                       1 cancelled
    send later_copy by_id 9d                            1 cancelled
    send wrongly_cancelled by_id 9d                     1 cancelled
rescheduled expired: the expiry moves with the due time; what is due when it is sent has none
    short reschedule 9d                                 1 cancelled
    short reschedule away:9d 1m                         0 cancelled
    short fire away:2h 9d                               1 cancelled
    short to_the_past away:2h 9d                        1 cancelled
    expiry send fire away:2h 9d                         1 cancelled
    short away:9d 1m reschedule 9d                      1 unknown: expired
rescheduled paused: a message that waits for the end of a pause can be replaced
    soon pause 1h reschedule resume 9d                  1 cancelled
rescheduled spread: also while it waits for its turn
    soon pause 1h spread reschedule 9d                  1 cancelled
rescheduled drained: the cancellation finds a message that went to the window early
    send drain 1m reschedule 4d                         1 cancelled
cancelled expired: what is cancelled does not expire, what has expired is not cancelled
    dead_letters short cancel away:9d 1m                0 cancelled
    short away:9d 1m cancel 1m                          0 unknown: expired
    expiry send cancel away:9d 1m                       0 cancelled
cancelled paused: a message that waits for the end of a pause can be cancelled
    soon pause 1h cancel resume 1m                      0 cancelled
cancelled spread: also while it waits for its turn
    soon pause 1h spread cancel 2h                      0 cancelled
cancelled drained: the cancellation finds its message, and a drain takes it along
    send drain 1m cancel 3d10m                          0 cancelled
    send cancel drain 1m                                0 cancelled
expired paused: a pause stops no expiry, which is decided at its end
    short pause 3d 2h resume 1m                         0
    short pause 3d30m resume 1m                         1
expired spread: it is decided when its turn comes
    short pause 3d30m spread 1h1m                       0
expired drained: a drain passes an expired message on, and the dispatcher decides by the policy
    short away:9d drain 1m                              0
    dead_letters short away:9d drain 1m                 0 letter
    short drain 3d1m                                    1
    broker: dead_letters short away:9d drain 1m         0 letter
paused spread: a pause ends a spread
    soon pause 1h spread pause 2h resume 1m             1
paused drained: it waits in the window
    send pause drain 9d resume 1m                       1
spread drained: it leaves in its turn
    send pause drain 9d spread 1h1m                     1
"""
REASONS = {
    "its target could not be written: the message is held, or was": "held",
    "no such message was there 60000 ms after its due time": "missing",
}


class Story:
    """A level topic, and one message with everything that happens to it."""

    def __init__(self, window: FinalWindow) -> None:
        self.memory = MemoryPulsar()
        self.clock, self.admin = self.memory.clock, self.memory.admin
        self.client = self.memory.client()
        self.target = ORDERS
        self.back()
        self.description = topics.create(
            self.admin,
            LevelTopicDescription(
                *(f"{ORDERS}-delay-level", LEVELS, (ORDERS, RETRY)),
                final_window=window,
                hold_pause_ms=60_000,
            ),
        )
        self.producers: dict[str, Any] = {}
        self.receipt: Receipt | None = None
        self.cancelled: Receipt | None = None
        self.told: Outcome | None = None
        self.handled: list[int] = []
        self.early: list[int] = []

    def tell(self, steps: str) -> None:
        for step in steps.split():
            name, _, length = step.rpartition(":")
            if not length[0].isdigit():
                (STEPS.get(length) or getattr(Story, length))(self)
            elif name == "away":
                self.clock.advance(parse_delay(length, "the time"))
            else:
                self.advance(parse_delay(length, "the time"))

    def advance(self, left: timedelta) -> None:
        """Let time pass, with a look at the outcome before its topic forgets it."""
        while left > timedelta(0):
            step = min(left, 12 * HOUR)
            self.memory.advance(step)
            left -= step
            if self.cancelled is not None:
                self.told = self.producer().outcome(self.cancelled) or self.told

    def end(self) -> str:
        """Return the end of the story, as the table has it."""
        arrived = len(self.handled)
        if self.target != RETRY:
            now = str(self.clock.now_ms())
            found = self.memory.delivered(self.target)
            arrived = sum(message.properties[env.DUE] <= now for message in found)
        words = [str(arrived), *["letter"] * self.letters()]
        if self.told is not None:
            reason = REASONS.get(self.told.reason, self.told.reason)
            words.append(self.told.status.value + (f": {reason}" if reason else ""))
        elif self.cancelled is not None:
            words.append("no outcome")
        return " ".join(words)

    def letters(self) -> int:
        """Return the number of dead letters, of the level topic and of the listener."""
        topics = self.description.dead_letter_topic.partition(0).full, f"{ORDERS}-billing-DLQ"
        names = TopicName.parse(topics[0]), TopicName.parse(topics[1]).partition(0)
        return sum(
            self.admin.partition_stats(name).subscriptions["delaylevel"].backlog_entries
            for name in names
            if self.admin.topic_exists(name)
        )

    # -- the message

    def send(self, after: timedelta = FAR, **options: Any) -> None:
        self.receipt = self.producer().schedule(b"m", deliver_after=after, **options)

    def listen(self, error: Exception) -> None:
        """Let the first attempt of a listener fail."""
        self.target, app = RETRY, Listeners(self.client)
        attempts = 0

        @app.on("orders", subscription="billing", retry=Backoff(FAR, FAR))
        def bill(message: Any) -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise error
            self.handled.append(message.attempt)
            if message.due is not None and self.clock.now() < message.due:
                self.early.append(message.attempt)

        self.client.create_producer("orders").send(b"m")
        self.memory.advance(timedelta(seconds=1))

    def letter(self, **options: Any) -> None:
        """Let a message become a dead letter."""
        self.send(**options)
        self.change(on_missing_target=MissingTarget.DEAD_LETTER)
        self.gone()
        self.memory.advance(FAR + timedelta(minutes=1))
        self.back()
        assert self.letters() == 1
        self.change(on_missing_target=MissingTarget.HOLD)

    # -- what happens to it

    def gone(self) -> None:
        self.admin.delete(TopicName.parse(self.target), force=True)

    def back(self) -> None:
        name = TopicName.parse(self.target)
        with suppress(ConflictError):
            self.admin.create_partitioned(name, 1)
        with suppress(ConflictError):
            self.admin.create_subscription(name, "billing" if self.target == RETRY else "app")

    def producer(self) -> Any:
        if self.target not in self.producers:  # a new one would create the topic
            self.producers[self.target] = self.client.create_producer(
                self.target,
                enable_delay_level_topic=True,
                delay_level_topic=f"{ORDERS}-delay-level",
                create_level_topic=False,
            )
        return self.producers[self.target]

    def replay(self, due_ms: int | None = None) -> None:
        source = None
        if self.target == RETRY:
            found = find_dead_letters(self.admin, ORDERS, "billing")
            assert found is not None
            source = found[1]
        description = topics.describe(self.admin, self.description.topic)
        (replayed,) = replay(
            self.client,
            self.admin,
            description,
            lambda _: True,
            due_ms=due_ms,
            clock=self.clock,
            source=source,
        )
        assert replayed.done

    def found(self) -> Receipt:
        """Return the receipt of the message as the command line finds it, or as it was sent."""
        topic = self.description.topic
        look = Inspector(self.client, self.admin, topic, clock=self.clock, live=False)
        found, _ = receipts_of(self.description, pending_rows(look, Selection()))
        receipt = found[0] if found else self.receipt
        assert receipt is not None
        return receipt

    def later_copy(self) -> None:
        assert self.receipt is not None
        self.producer().send(b"m", deliver_after=2 * FAR, message_id=self.receipt.id)

    def wrongly_cancelled(self) -> None:
        assert self.receipt is not None
        at = self.clock.now() + 3 * FAR
        self.producer().cancel(message_id=self.receipt.id, deliver_at=at)

    def by_id(self) -> None:
        old = self.cancelled = self.receipt
        assert old is not None
        options = {"deliver_after": FAR, "message_id": old.id, "replace": True}
        self.receipt = self.producer().schedule(b"m", **options)

    def reschedule(self, after: timedelta = FAR) -> None:
        old = self.cancelled = self.found()
        at = self.clock.now() + after
        try:
            new = self.producer().reschedule(old, deliver_at=at)
        except InvalidInputError:  # its place is gone
            new = self.producer().reschedule(old, b"m", deliver_at=at)
        self.receipt = new.receipt

    def fire(self) -> None:
        self.cancelled = self.found()
        self.receipt = self.producer().fire_now(self.cancelled).receipt

    def cancel(self) -> None:
        self.told = None
        again = self.receipt is not None and self.cancelled is not None
        self.cancelled = self.receipt if again else self.found()
        self.producer().cancel(self.cancelled)

    def change(self, **settings: Any) -> None:
        change_settings(self.admin, self.description.topic, **settings)

    def pause(self, target: str | None = None) -> None:
        pause(self.admin, self.description.topic, target, self.clock)

    def resume(self, spread_ms: int = 0) -> None:
        resume(self.admin, self.description.topic, None, self.clock, spread_ms)

    def drain(self) -> None:
        description = topics.describe(self.admin, self.description.topic)
        drain(self.client, self.admin, description, clock=self.clock)


#: The steps that are calls of methods with arguments.
STEPS: dict[str, Callable[[Story], object]] = {
    "soon": lambda story: story.send(timedelta(minutes=10)),
    "short": lambda story: story.send(expires_after=HOUR),
    "short_letter": lambda story: story.letter(expires_after=HOUR),
    "retry": lambda story: story.listen(ValueError("no money")),
    "retry_at_once": lambda story: story.listen(Retry(after=timedelta(0))),
    "rejected": lambda story: story.listen(Reject("only EUR")),
    "replay_later": lambda story: story.replay(story.clock.now_ms() + FAR_MS),
    "to_the_past": lambda story: story.reschedule(-2 * HOUR),
    "expiry": lambda story: story.change(expire_after_ms=3_600_000),
    "dead_letters": lambda story: story.change(expired=Expired.DEAD_LETTER),
    "dropping": lambda story: story.change(on_missing_target=MissingTarget.DROP),
    "pause_orders": lambda story: story.pause(ORDERS),
    "spread": lambda story: story.resume(spread_ms=3_600_000),
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield each row of the table: its pair, its story and its end."""
    pair = ""
    for line in filter(None, TABLE.splitlines()):
        if line.startswith(" "):
            steps, _, end = line.strip().partition("  ")
            yield pair, steps, end.strip()
        else:
            pair = line.partition(":")[0]


@pytest.fixture(autouse=True)
def _outcomes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep outcomes that are older than a day: some stories end days after a decision."""
    monkeypatch.setattr(outcomes, "expire_outcomes", lambda *_: None)


@pytest.mark.parametrize(
    ("steps", "end"), [pytest.param(*row, id=f"{pair}: {row[0]}") for pair, *row in rows()]
)
def test_two_features_meet(steps: str, end: str) -> None:
    told = steps.removeprefix("broker: ")
    story = Story(FinalWindow.TRACKER if told == steps else FinalWindow.BROKER)
    with story.memory:
        story.tell(told)
        assert story.end() == end
        assert not story.early


def test_every_pair_has_a_row() -> None:
    assert {pair for pair, *_ in rows()} == {" ".join(pair) for pair in combinations(FEATURES, 2)}
