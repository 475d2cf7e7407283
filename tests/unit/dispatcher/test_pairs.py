"""Tests of one message at which two features meet: a table in which every pair has a row.

A row is a story about one message, told in steps. A step is a method of `Story`; ``3d`` lets that
time pass while everything runs, and ``away:3d`` while neither mover nor dispatcher does. All of it
is the product, on the in-memory Pulsar and by its clock; no message may ever be early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from delaylevel import Levels, Listeners, Outcome, PartitionBy, PartitionStrategy, Receipt, topics
from delaylevel.cluster.reader import read_range
from delaylevel.consumer import Backoff, Reject, Retry
from delaylevel.consumer.retry_topics import find_dead_letters
from delaylevel.dispatcher.publishing import outcomes
from delaylevel.errors import ConflictError, InvalidInputError
from delaylevel.model import envelope as env
from delaylevel.model.formatting import parse_delay
from delaylevel.model.level_topic import Expired, FinalWindow, LevelTopicDescription, MissingTarget
from delaylevel.model.outcome import place_of
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
LEVELS = Levels([PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=30))])


class Row(NamedTuple):
    """A story, and its end.

    Attributes:
        first, second: the features that meet.
        steps: the story.
        why: the rule that it shows.
        delivered: number of times that the message reached its topic; for a retry, the number of
            times that the listener handled it.
        outcome: the outcome of the cancellation.
        letters: number of dead letters at the end.
        window: the final window.
    """

    first: str
    second: str
    steps: str
    why: str
    delivered: int = 1
    outcome: str = ""
    letters: int = 0
    window: FinalWindow = FinalWindow.TRACKER


BROKER = FinalWindow.BROKER
TABLE = [
    Row("retry", "held", "retry gone 3d1m back 1h", "a retry waits for its topic"),
    Row(
        *("retry", "held", "dropping retry gone 3d1m back 1h"),
        "a retry is never dropped: it is a dead letter if its topic is gone",
        delivered=0,
        letters=1,
    ),
    Row("retry", "replayed", "rejected replay 1m", "a replay is a new first attempt"),
    Row(
        *("retry", "rescheduled", "retry reschedule 9d"),
        "a retry that gets another time is an attempt of the same message",
        outcome="cancelled",
    ),
    Row("retry", "rescheduled", "retry fire 9d", "it can be handled now", outcome="cancelled"),
    Row(
        *("retry", "cancelled", "retry cancel 9d"),
        "whoever cancels a retry wants no other attempt",
        delivered=0,
        outcome="cancelled",
    ),
    Row("retry", "expired", "retry expiry away:9d 1m", "no default ever applies to a retry"),
    Row("retry", "expired", "expiry retry away:9d 1m", "neither one that is set before"),
    Row("retry", "expired", "expiry retry_at_once 1m", "nor to one without a delay"),
    Row("retry", "expired", "retry expiry away:9d 1m", "nor with the broker", window=BROKER),
    Row("retry", "expired", "rejected expiry replay away:9d 1m", "nor to a replayed one"),
    Row(
        "retry",
        "expired",
        "retry expiry reschedule away:9d 1m",
        "or a later one",
        outcome="cancelled",
    ),
    Row("retry", "expired", "retry expiry gone away:3d1m 2h back 1h", "nor to a held one"),
    Row("retry", "paused", "retry pause 9d resume 1m", "it waits, as all messages do"),
    Row("retry", "paused", "retry pause_orders 3d1m", "its topic is not that of the others"),
    Row("retry", "paused", "retry expiry pause 9d resume 1m", "it does not expire meanwhile"),
    Row("retry", "spread", "retry pause 9d spread 1h1m", "it leaves in its turn"),
    Row("retry", "drained", "retry drain 3d1m", "it waits in the window until it is due"),
    Row("held", "replayed", "letter gone replay 1m back 1h", "a replayed message is held, too"),
    Row(
        *("held", "rescheduled", "send gone 3d1m reschedule back 9d"),
        "a held message cannot be cancelled, and the outcome says so: both are delivered",
        delivered=2,
        outcome="unknown: its target could not be written: the message is held, or was",
    ),
    Row(
        *("held", "cancelled", "send gone 3d1m cancel back 1h"),
        "a cancellation of a held message has no effect, and says so",
        outcome="unknown: its target could not be written: the message is held, or was",
    ),
    Row(
        *("held", "cancelled", "send gone 3d1m back away:1m drain cancel 1h"),
        "also if the message is back in the window",
        outcome="unknown: its target could not be written: the message is held, or was",
    ),
    Row(
        *("held", "cancelled", "send cancel gone 3d1m back 1h"),
        "a cancelled message is not held",
        delivered=0,
        outcome="cancelled",
    ),
    Row("held", "expired", "short gone 3d1m 2h back 1h", "it expires when it is back", delivered=0),
    Row(
        *("held", "expired", "dead_letters short gone 3d1m 2h back 1h"),
        "or becomes a dead letter",
        delivered=0,
        letters=1,
    ),
    Row(
        *("held", "expired", "short gone 3d1m 2h back 1h", "also with the broker"),
        delivered=0,
        window=BROKER,
    ),
    Row("held", "paused", "send gone 3d1m pause back 1h resume 1m", "it waits in the window"),
    Row("held", "spread", "send gone 3d1m pause back 1h spread 1h1m", "it leaves in its turn"),
    Row("held", "drained", "send gone 3d1m back drain 1m", "a drain tries held messages, too"),
    Row("held", "drained", "send gone 3d1m drain back 1h", "it is held again if that fails"),
    Row(
        *("replayed", "rescheduled", "letter replay_later reschedule 9d"),
        "a replayed message is like any other",
        outcome="cancelled",
    ),
    Row(
        *("replayed", "rescheduled", "letter reschedule 5m replay 9d"),
        "a dead letter cannot be cancelled, and the outcome says so: both are delivered",
        delivered=2,
        outcome="unknown: no such message was there 60000 ms after its due time",
    ),
    Row(
        *("replayed", "cancelled", "letter replay_later cancel 9d"),
        "a replayed message is like any other",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("replayed", "cancelled", "letter cancel 5m replay 1m"),
        "a cancellation of a dead letter has no effect, and says so",
        outcome="unknown: no such message was there 60000 ms after its due time",
    ),
    Row("replayed", "expired", "dead_letters short away:9d 1m replay 1m", "a replay is an order"),
    Row("replayed", "expired", "short_letter 2h replay 1m", "whatever the reason was"),
    Row("replayed", "expired", "letter expiry 2h replay 1m", "also against the default"),
    Row("replayed", "expired", "letter replay_later expiry away:9d 1m", "and against later ones"),
    Row("replayed", "expired", "short_letter replay_later away:9d 1m", "its own ends as well"),
    Row(
        "replayed", "expired", "dead_letters short away:9d 1m replay 1m", "as above", window=BROKER
    ),
    Row("replayed", "paused", "letter pause replay 1h resume 1m", "it waits in the window"),
    Row("replayed", "spread", "letter pause replay 1h spread 1h1m", "it leaves in its turn"),
    Row("replayed", "drained", "letter replay_later drain 3d1m", "it waits in the window"),
    Row("replayed", "drained", "letter drain replay 1m", "a drain leaves dead letters alone"),
    Row(
        *("rescheduled", "cancelled", "send reschedule cancel 9d"),
        "the new message can be cancelled as well",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "cancelled", "send cancel reschedule 9d"),
        "a cancelled message can be replaced: it stays cancelled",
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "expired", "short reschedule 9d"),
        "the expiry moves with the due time",
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "expired", "short reschedule away:9d 1m"),
        "the new message expires as long after its due time as the old one",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "expired", "short fire away:2h 9d"),
        "what is due when it is sent does not expire",
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "expired", "short to_the_past away:2h 9d"),
        "neither if it was due long ago",
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "expired", "expiry send fire away:2h 9d"),
        "the default does not apply to it either",
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "expired", "short away:9d 1m reschedule 9d"),
        "a message that has expired can be sent again",
        outcome="unknown: expired",
    ),
    Row(
        *("rescheduled", "paused", "soon pause 1h reschedule resume 9d"),
        "a message that waits for the end of a pause can be replaced",
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "spread", "soon pause 1h spread reschedule 9d"),
        "also while it waits for its turn",
        outcome="cancelled",
    ),
    Row(
        *("rescheduled", "drained", "send drain 1m reschedule 4d"),
        "the cancellation finds a message that went to the window early",
        outcome="cancelled",
    ),
    Row(
        *("cancelled", "expired", "dead_letters short cancel away:9d 1m"),
        "a cancelled message does not expire, and is no dead letter",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("cancelled", "expired", "short away:9d 1m cancel 1m"),
        "a message that has expired is not cancelled",
        delivered=0,
        outcome="unknown: expired",
    ),
    Row(
        *("cancelled", "expired", "expiry send cancel away:9d 1m"),
        "a cancellation itself does not expire",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("cancelled", "paused", "soon pause 1h cancel resume 1m"),
        "a message that waits for the end of a pause can be cancelled",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("cancelled", "spread", "soon pause 1h spread cancel 2h"),
        "also while it waits for its turn",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("cancelled", "drained", "send drain 1m cancel 3d10m"),
        "the cancellation finds a message that went to the window early",
        delivered=0,
        outcome="cancelled",
    ),
    Row(
        *("cancelled", "drained", "send cancel drain 1m"),
        "a drain takes the cancellation along",
        delivered=0,
        outcome="cancelled",
    ),
    Row("expired", "paused", "short pause 3d 2h resume 1m", "a pause stops no expiry", delivered=0),
    Row(
        *("expired", "paused", "short pause 3d30m resume 1m"),
        "it is decided at the end of the pause",
    ),
    Row(
        *("expired", "spread", "short pause 3d30m spread 1h1m"),
        "and then when its turn comes",
        delivered=0,
    ),
    Row(
        *("expired", "drained", "short away:9d drain 1m"),
        "a drain passes an expired message on, and the dispatcher decides",
        delivered=0,
    ),
    Row(
        *("expired", "drained", "dead_letters short away:9d drain 1m"),
        "by the policy of the level topic",
        delivered=0,
        letters=1,
    ),
    Row(
        *("expired", "drained", "short drain 3d1m"),
        "a message in the window that has not expired is delivered",
    ),
    Row(
        *("expired", "drained", "dead_letters short away:9d drain 1m", "the mover decides"),
        delivered=0,
        letters=1,
        window=BROKER,
    ),
    Row("paused", "spread", "soon pause 1h spread pause 2h resume 1m", "a pause ends a spread"),
    Row("paused", "drained", "send pause drain 9d resume 1m", "it waits in the window"),
    Row("spread", "drained", "send pause drain 9d spread 1h1m", "it leaves in its turn"),
]


class Story:
    """A level topic, and one message with everything that happens to it."""

    def __init__(self, window: FinalWindow) -> None:
        self.memory = MemoryPulsar()
        self.clock, self.admin = self.memory.clock, self.memory.admin
        self.client = self.memory.client()
        self.target = ORDERS
        self.subscribe()
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
                getattr(self, length)()
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

    # -- the end

    @property
    def delivered(self) -> int:
        if self.target == RETRY:
            return len(self.handled)
        found = self.memory.delivered(self.target)
        return sum(message.properties[env.DUE] <= str(self.clock.now_ms()) for message in found)

    @property
    def outcome(self) -> str:
        found = self.told
        if found is None:
            return "" if self.cancelled is None else "none"
        return f"{found.status.value}: {found.reason}" if found.reason else found.status.value

    @property
    def letters(self) -> int:
        own = self.description.dead_letter_topic.partition(0).full
        return self.unacknowledged(own) + self.unacknowledged(f"{ORDERS}-billing-DLQ-partition-0")

    def unacknowledged(self, topic: str) -> int:
        name = TopicName.parse(topic)
        if not self.admin.topic_exists(name):
            return 0
        return self.admin.partition_stats(name).subscriptions["delaylevel"].backlog_entries

    # -- the message

    def send(self) -> None:
        self.receipt = self.producer().schedule(b"m", deliver_after=FAR)

    def soon(self) -> None:
        self.receipt = self.producer().schedule(b"m", deliver_after=timedelta(minutes=10))

    def short(self) -> None:
        self.receipt = self.producer().schedule(b"m", deliver_after=FAR, expires_after=HOUR)

    def retry(self) -> None:
        self.listen(ValueError("no money"))

    def retry_at_once(self) -> None:
        self.listen(Retry(after=timedelta(0)))

    def rejected(self) -> None:
        self.listen(Reject("only EUR"))

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

    def letter(self) -> None:
        self.send()
        self.bury()

    def short_letter(self) -> None:
        self.short()
        self.bury()

    def bury(self) -> None:
        change_settings(
            self.admin, self.description.topic, on_missing_target=MissingTarget.DEAD_LETTER
        )
        self.gone()
        self.memory.advance(FAR + timedelta(minutes=1))
        self.back()
        assert self.letters == 1
        change_settings(self.admin, self.description.topic, on_missing_target=MissingTarget.HOLD)

    # -- what happens to it

    def gone(self) -> None:
        self.admin.delete(TopicName.parse(self.target), force=True)

    def back(self) -> None:
        name = TopicName.parse(self.target)
        with suppress(ConflictError):
            self.admin.create_partitioned(name, 1)
        with suppress(ConflictError):
            self.admin.create_subscription(name, "billing" if self.target == RETRY else "app")

    def subscribe(self) -> None:
        self.back()

    def producer(self) -> Any:
        if self.target not in self.producers:  # a new one would create the topic
            self.producers[self.target] = self.client.create_producer(
                self.target,
                enable_delay_level_topic=True,
                delay_level_topic=f"{ORDERS}-delay-level",
                create_level_topic=False,
            )
        return self.producers[self.target]

    def replay(self) -> None:
        self.replay_at(None)

    def replay_later(self) -> None:
        self.replay_at(self.clock.now_ms() + int(FAR.total_seconds() * 1000))

    def replay_at(self, due_ms: int | None) -> None:
        source = None
        if self.target == RETRY:
            found = find_dead_letters(self.admin, ORDERS, "billing")
            assert found is not None
            source = found[1]
        description = topics.describe(self.admin, self.description.topic)
        report = replay(
            self.client,
            self.admin,
            description,
            lambda _: True,
            due_ms=due_ms,
            clock=self.clock,
            source=source,
        )
        assert report.replayed == 1

    def found(self) -> Receipt:
        """Return the receipt of the message as the command line finds it, or as it was sent."""
        for member in self.description.members():
            if member.topic in (
                self.description.dead_letter_topic,
                self.description.outcomes_topic,
            ):
                continue
            for index in range(member.partitions):
                partition = member.topic.partition(index)
                last = self.admin.last_message_id(partition)
                if last is None or member.topic == self.description.journal_topic:
                    continue
                begin = self.admin.mark_delete_position(partition, "delaylevel").next_entry
                for message in read_range(self.client, partition.full, begin, last.next_entry):
                    if env.KIND not in message.properties and message.value == b"m":
                        return Receipt(
                            message.properties.get(env.ID) or message.stable_id(partition.full),
                            int(message.properties[env.DUE]),
                            self.target,
                            self.description.topic,
                            message.key,
                            place_of(partition.full, message.ledger, message.entry),
                        )
        assert self.receipt is not None
        return self.receipt

    def reschedule(self) -> None:
        self.reschedule_by(FAR)

    def to_the_past(self) -> None:
        self.reschedule_by(-2 * HOUR)

    def reschedule_by(self, after: timedelta) -> None:
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
        if self.receipt is None or self.cancelled is None:
            self.cancelled = self.found()
        else:
            self.cancelled = self.receipt
        self.producer().cancel(self.cancelled)

    def expiry(self) -> None:
        change_settings(self.admin, self.description.topic, expire_after_ms=3_600_000)

    def dead_letters(self) -> None:
        change_settings(self.admin, self.description.topic, expired=Expired.DEAD_LETTER)

    def dropping(self) -> None:
        change_settings(self.admin, self.description.topic, on_missing_target=MissingTarget.DROP)

    def pause(self) -> None:
        pause(self.admin, self.description.topic, None, self.clock)

    def pause_orders(self) -> None:
        pause(self.admin, self.description.topic, ORDERS, self.clock)

    def resume(self) -> None:
        resume(self.admin, self.description.topic, None, self.clock)

    def spread(self) -> None:
        resume(self.admin, self.description.topic, None, self.clock, spread_ms=3_600_000)

    def drain(self) -> None:
        description = topics.describe(self.admin, self.description.topic)
        drain(self.client, self.admin, description, clock=self.clock)


@pytest.fixture
def story(request: pytest.FixtureRequest) -> Iterator[Story]:
    story = Story(request.param)
    yield story
    story.memory.close()


@pytest.fixture(autouse=True)
def _outcomes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep outcomes that are older than a day: some stories end days after a decision."""
    monkeypatch.setattr(outcomes, "expire_outcomes", lambda *_: None)


@pytest.mark.parametrize(
    ("story", "row"),
    [
        pytest.param(row.window, row, id=f"{row.first} and {row.second}: {row.steps}")
        for row in TABLE
    ],
    indirect=["story"],
)
def test_two_features_meet(story: Story, row: Row) -> None:
    story.tell(row.steps)
    end = story.delivered, story.outcome, story.letters
    assert end == (row.delivered, row.outcome, row.letters), row.why
    assert not story.early


def test_every_pair_has_a_row() -> None:
    assert {(row.first, row.second) for row in TABLE} == set(combinations(FEATURES, 2))
