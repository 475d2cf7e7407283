"""Contract of scheduling and cancelling: the records that are stored, and the answers to callers.

The producer for threads and the one for asyncio do the same. No dispatcher decides here: tests
publish outcomes themselves, in the form of the wire format.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import JsonSchema, Record, String

from delaylevel import Outcome, OutcomeStatus, Receipt, topics
from delaylevel.cluster.client_parts.cores import not_stored
from delaylevel.errors import (
    CancellationFailedError,
    DelayTooLongError,
    InvalidDelayError,
    InvalidInputError,
    LevelTopicError,
    MessageTooLargeError,
)
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.outcome import place_of
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.testing.memory.broker import Broker
from delaylevel.topics.outcomes import Outcomes
from support.world import World

HOUR, AT = timedelta(hours=1), 1_900_000_000_000
LEVELS = Levels(
    [
        PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=3)),
        # Few partitions: creating one takes a real broker some 25 ms.
        PartitionStrategy(partition_by=timedelta(hours=8), maximum_delay=timedelta(days=1)),
    ]
)
# For the window, the second level, and the first.
NEAR, LATER, FAR = timedelta(minutes=10), timedelta(hours=9), timedelta(days=2, minutes=5)
DAYS, HOURS, WINDOW = (f"orders-delay-level{suffix}" for suffix in ("", "-8h", "-window"))
WORLDS = ("memory", "asyncio", "real")
CLOSED = (pulsar.AlreadyClosed, pulsar.asyncio.PulsarException)
#: For what is refused before anything reaches a broker.
in_memory = pytest.mark.parametrize("world", ["memory", "asyncio"], indirect=True)


class Order(Record):  # type: ignore[misc]
    name = String()


class Scene:
    """The level topic of a business topic, and producers of it."""

    def __init__(self, world: World, name: str = "orders", **values: Any) -> None:
        self.world = world
        self.topic = world.topic(name)
        values = {"window_partitions": 3, **values}
        description = LevelTopicDescription(
            f"{self.topic}-delay-level", LEVELS, (self.topic,), **values
        )
        self.description = topics.create(world.admin, description)

    def producer(self, **options: Any) -> Any:
        options = {"enable_delay_level_topic": True, "create_level_topic": False, **options}
        return self.world.client().create_producer(self.topic, **options)

    def stored(self) -> dict[str, list[ParkedMessage]]:
        """Return the messages of all topics that are not empty."""
        topics_ = (DAYS, HOURS, WINDOW, "orders")
        found = {name: self.world.stored(self.world.topic(name)) for name in topics_}
        return {name: messages for name, messages in found.items() if messages}

    def outcomes(self) -> Any:
        """Return a producer of outcomes, as a dispatcher has."""
        topic = self.description.outcomes_topic.partition(0).full
        return self.world.plain_client.create_producer(topic)

    def decide(self, *outcomes: Outcome) -> None:
        writer = self.outcomes()
        for outcome in outcomes:
            writer.send(outcome.payload(), outcome.properties(), partition_key=outcome.id)


def decided(receipt: Receipt, status: OutcomeStatus, reason: str = "", **changed: Any) -> Outcome:
    values = {"key": receipt.key, "target": receipt.target, "reason": reason, **changed}
    due_ms = receipt.due_ms
    return Outcome(status, receipt.id, due_ms=due_ms, decided_ms=due_ms + 1, **values)


@pytest.fixture
def scene(world: World) -> Scene:
    return Scene(world)


@pytest.fixture
def producer(scene: Scene) -> Any:
    return scene.producer()


@pytest.mark.parametrize("batched", [False, True])
def test_a_receipt_tells_where_its_message_is(scene: Scene, batched: bool) -> None:
    producer = scene.producer(batching_enabled=batched)
    receipts = {}
    for index, after in enumerate([NEAR, LATER, FAR, FAR, timedelta(0)]):
        key = f"k{index}" if index % 2 else None
        body = b"%d" % index
        receipts[body] = producer.schedule(body, partition_key=key, deliver_after=after)
    receipts[b"own"] = producer.schedule(b"own", deliver_after=FAR, message_id="mine")
    assert receipts[b"own"].id == "mine"
    assert len({receipt.id for receipt in receipts.values()}) == 6
    for name, messages in scene.stored().items():
        for message in messages:
            receipt = receipts.pop(message.value)
            assert Receipt.parse(str(receipt)) == receipt
            assert receipt.place is not None
            partition, position = receipt.place
            assert partition.startswith(scene.world.topic(name))
            assert position == message.position.entry_start
            assert (receipt.key, receipt.id) == (message.key, message.properties[env.ID])
            ours = (scene.topic, scene.description.topic, name == "orders")
            assert (receipt.target, receipt.level_topic, receipt.sent_directly) == ours
            assert receipt.sent_directly or str(receipt.due_ms) == message.properties[env.DUE]
    assert receipts == {}


@pytest.mark.parametrize("after", [NEAR, LATER, FAR])
@pytest.mark.parametrize("key", [None, "", "Kunde 7"])
def test_a_cancellation_takes_the_way_of_its_message(
    scene: Scene, producer: Any, after: timedelta, key: str | None
) -> None:
    for own_id in (None, "mine"):
        options = {"partition_key": key, "message_id": own_id, "deliver_after": after}
        receipt = producer.schedule(b"body", **options)
        outcome = producer.cancel(str(receipt) if key else receipt)
        accepted = (OutcomeStatus.ACCEPTED, receipt.id, receipt.target, receipt.due_ms)
        assert outcome == Outcome(*accepted, key=receipt.key)
        assert own_id in (None, receipt.id)
        topic, position = receipt.place
        message, record = scene.world.stored(topic)[-2:]
        assert message.position.entry_start == position
        assert (record.value, record.key) == (b"cancel", message.key)
        assert record.properties == {
            "delaylevel.kind": "cancel",
            "delaylevel.due": str(receipt.due_ms),
            "delaylevel.target": scene.topic,
            "delaylevel.id": receipt.id,
        }


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("delay", [NEAR, FAR])  # in the window, in a level
def test_a_message_without_an_id_is_cancelled_where_it_was_found(
    scene: Scene, producer: Any, delay: timedelta, key: str | None
) -> None:
    due_ms = scene.world.clock.now_ms() + delay // timedelta(milliseconds=1)
    for _ in range(9):
        producer.send(b"x", deliver_at=due_ms, partition_key=key)
    hashed = scene.description.window_partition
    # Without a key, one in the window is elsewhere than a mover would put it.
    topic, message = next(
        (name, message)
        for member in scene.description.members()
        if member.role in (Role.LEVEL, Role.WINDOW)
        for index in range(member.partitions)
        for name in [member.topic.partition(index).full]
        for message in scene.world.stored(name)
        if key or member.role is Role.LEVEL or hashed("", message.stable_id(name)) != index
    )
    own_id = message.stable_id(topic)
    found = Receipt(own_id, due_ms, scene.topic, scene.description.topic, message.key)
    before = scene.stored()
    # Clients spell positions in different ways, and without a key only the place tells the
    # window partition.
    for position in (own_id, f"{topic}:{message.ledger}:{message.entry}:0"):
        with pytest.raises(InvalidInputError, match=f"delaylevel pending cancel .* {position}"):
            producer.cancel(message_id=position, deliver_at=due_ms, partition_key=key)
    with pytest.raises(InvalidInputError, match="position"):
        producer.reschedule(found, b"y", deliver_after=LATER)
    assert scene.stored() == before
    found = replace(found, stored_at=place_of(topic, message.ledger, message.entry))
    assert producer.cancel(found).id == own_id
    assert scene.world.stored(topic)[-1].properties[env.ID] == own_id
    again = producer.reschedule(found, deliver_after=LATER)
    assert again.receipt.id != own_id
    (new,) = scene.stored()[HOURS]
    assert (new.value, new.properties[env.REPLACES]) == (b"x", own_id)


def test_a_message_that_was_due_at_once_cannot_be_cancelled(scene: Scene, producer: Any) -> None:
    past_ms = scene.world.clock.now_ms() - 5000
    for options in ({"deliver_at": past_ms}, {"deliver_after": timedelta(0)}):
        receipt = producer.schedule(b"now", **options)
        outcome = producer.cancel(str(receipt), timeout=timedelta(seconds=5))
        assert outcome.status is OutcomeStatus.TOO_LATE
        assert "straight to its topic" in outcome.reason
        with pytest.raises(InvalidInputError, match="went straight to"):
            producer.reschedule(receipt, deliver_after=NEAR)
    assert list(scene.stored()) == ["orders"]
    again = producer.reschedule(receipt, b"again", deliver_after=NEAR)
    assert again.outcome.status is OutcomeStatus.TOO_LATE
    assert [message.value for message in scene.stored()[WINDOW]] == [b"again"]


# -- refused


@in_memory
def test_the_broker_cannot_take_a_message_back(world: World) -> None:
    scene = Scene(world, final_window=FinalWindow.BROKER)
    producer = scene.producer()
    near, receipt = (producer.schedule(b"x", deliver_after=after) for after in (NEAR, FAR))
    for call in (
        lambda: producer.cancel(near),
        lambda: producer.cancel(receipt),
        lambda: producer.reschedule(receipt, deliver_after=NEAR),
        lambda: producer.fire_now(receipt, b"y"),
        lambda: producer.outcome(receipt),
    ):
        with pytest.raises(LevelTopicError, match=r"final window is 'broker'.*nothing was sent"):
            call()
        with pytest.raises(pulsar.PulsarException):
            call()
    assert len(scene.stored()[DAYS]) == 1


@in_memory
def test_a_receipt_of_another_message_is_refused(scene: Scene, producer: Any) -> None:
    receipt = Scene(scene.world, "others").producer().schedule(b"x", deliver_after=FAR)
    for call in (producer.cancel, producer.outcome, producer.fire_now):
        with pytest.raises(InvalidInputError, match=r"for .*others.* use a producer of"):
            call(receipt)
    with pytest.raises(InvalidInputError, match="damaged"):
        producer.cancel(str(receipt)[:-4])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "name the message"),
        ({"message_id": "x"}, "name the message"),
        ({"deliver_at": AT}, "name the message"),
        ({"message_id": "x", "deliver_at": 0}, "1970"),
        ({"message_id": "x", "deliver_at": AT // 1000}, "multiply seconds"),
        ({"message_id": "", "deliver_at": AT}, "1 to 512"),
        ({"message_id": "x", "deliver_at": "soon"}, "deliver_at is milliseconds"),
        ({"message_id": "x", "deliver_at": AT, "partition_key": 7}, "partition_key is a str"),
        ({"receipt": 7}, "a receipt is a Receipt or its text"),
        ({"receipt": "x"}, "is not a receipt"),
        ({"receipt": "x", "message_id": "y"}, "its receipt alone"),
        *(
            ({"timeout": wrong}, "give a timedelta or seconds")
            for wrong in (-1, timedelta(seconds=-1), "1", True, float("nan"))
        ),
    ],
)
@in_memory
def test_wrong_arguments_are_refused(
    scene: Scene, producer: Any, arguments: dict[str, Any], expected: str
) -> None:
    calls = [producer.cancel]
    if "timeout" in arguments:
        receipt = Receipt("old", AT, scene.topic, scene.description.topic)
        calls, arguments = [producer.cancel, producer.fire_now], {"receipt": receipt, **arguments}
    for call in calls:
        with pytest.raises(InvalidInputError, match=expected):
            call(**arguments)
    assert scene.stored() == {}


@in_memory
def test_a_closed_producer_cancels_nothing(producer: Any) -> None:
    receipt = producer.schedule(b"x", deliver_after=FAR)
    producer.cancel(receipt, timeout=0.05)
    producer.close()
    for call in (
        lambda: producer.cancel(receipt),
        lambda: producer.cancel(receipt, timeout=1),
        lambda: producer.outcome(receipt),
        lambda: producer.fire_now(receipt),
        lambda: producer.schedule(b"x", deliver_after=FAR),
    ):
        with pytest.raises(CLOSED):
            call()


# -- reschedule


def test_a_message_is_rescheduled_as_it_was(world: World, scene: Scene) -> None:
    producer = scene.producer(schema=JsonSchema(Order))
    keys = {"partition_key": "k", "ordering_key": "o", "event_timestamp": 1234}
    receipt = producer.schedule(Order(name="ä"), {"own": "1"}, deliver_after=FAR, **keys)
    again = producer.reschedule(str(receipt), deliver_after=LATER)
    accepted = (OutcomeStatus.ACCEPTED, receipt.id, receipt.target, receipt.due_ms)
    assert again.outcome == Outcome(*accepted, key="k")
    old, cancellation = scene.stored()[DAYS]
    (new,) = scene.stored()[HOURS]
    assert cancellation.properties[env.ID] == receipt.id
    assert (new.value, new.key, new.ordering_key, new.event_ms) == (old.value, "k", "o", 1234)
    assert new.publish_ms <= cancellation.publish_ms  # stored first
    assert new.properties == {
        **old.properties,
        "delaylevel.id": again.receipt.id,
        "delaylevel.due": str(again.receipt.due_ms),
        "delaylevel.replaces": receipt.id,
    }
    assert again.receipt.id != receipt.id
    # The new receipt works, too.
    third = producer.reschedule(again.receipt, deliver_after=FAR, message_id="third")
    assert third.receipt.id == "third"
    assert scene.stored()[DAYS][-1].properties[env.REPLACES] == again.receipt.id


def test_a_message_is_rescheduled_with_other_contents(scene: Scene, producer: Any) -> None:
    receipt = producer.schedule(b"old", {"own": "1"}, partition_key="k", deliver_after=FAR)
    kept = producer.reschedule(receipt, b"new", deliver_after=LATER)
    moved = producer.reschedule(kept.receipt, b"newer", {"own": "2"}, "other", deliver_after=LATER)
    found = {(one.value, one.key, one.properties.get("own")) for one in scene.stored()[HOURS]}
    assert found == {(b"new", "k", None), (b"newer", "other", "2"), (b"cancel", "k", None)}
    assert (kept.receipt.key, moved.receipt.key) == ("k", "other")
    with pytest.raises(InvalidInputError, match="give the payload, too"):
        producer.reschedule(moved.receipt, properties={"own": "3"}, deliver_after=FAR)
    for call in (producer.schedule, lambda body: producer.reschedule(moved.receipt, body)):
        with pytest.raises(InvalidDelayError, match="give deliver_at or deliver_after"):
            call(b"x")


@in_memory
def test_a_message_is_not_replaced_under_its_own_id(scene: Scene, producer: Any) -> None:
    receipt = producer.schedule(b"old", None, "k", deliver_after=FAR, message_id="order-17")
    before = scene.stored()
    moved = {"deliver_after": NEAR, "message_id": "order-17"}
    for content, key in ((None, None), (b"new", None), (b"new", "k")):
        with pytest.raises(InvalidInputError, match=r"Leave message_id out.*nothing was sent"):
            producer.reschedule(receipt, content, partition_key=key, **moved)
    assert scene.stored() == before
    # With another key, it is another message.
    other = producer.reschedule(receipt, b"new", None, "l", **moved)
    assert (other.receipt.id, other.receipt.key) == ("order-17", "l")


@pytest.mark.parametrize("content", [None, b"new"])
def test_a_rescheduled_message_can_expire(
    scene: Scene, producer: Any, content: bytes | None
) -> None:
    receipt = producer.schedule(b"old", deliver_after=FAR, expires_after=2 * HOUR)

    def reschedule(**options: Any) -> int:
        """Return how long after its due time the message expires, ms; 0 for never."""
        nonlocal receipt
        receipt = producer.reschedule(receipt, content, **options).receipt
        new = [each for each in scene.stored()[HOURS] if each.value != b"cancel"][-1]
        return int(new.properties.get(env.EXPIRES, receipt.due_ms)) - receipt.due_ms

    after = {"deliver_after": LATER}
    assert reschedule(**after) == (0 if content else 7_200_000)
    assert reschedule(**after, expires_after=HOUR) == 3_600_000
    at = datetime.fromtimestamp(receipt.due_ms // 1000 + 60, timezone.utc)
    until_ms = round(at.timestamp() * 1000) - receipt.due_ms
    assert reschedule(deliver_at=receipt.due_ms, expires_at=at) == until_ms
    before = scene.stored()
    past_ms = scene.world.clock.now_ms() - 60_000
    for wrong, text in (
        ({**after, "expires_after": timedelta(0)}, "not later than the due time"),
        ({**after, "expires_at": at, "expires_after": HOUR}, "both given"),
        ({"deliver_at": past_ms, "expires_after": timedelta(seconds=1)}, "has expired already"),
    ):
        with pytest.raises(InvalidDelayError, match=text):
            reschedule(**wrong)
    assert scene.stored() == before


def test_a_message_is_fired_now(scene: Scene, producer: Any) -> None:
    receipt = producer.schedule(b"body", {"own": "1"}, deliver_after=FAR)
    # Its schema is known to the dispatcher only, so it goes through the window.
    fired = producer.fire_now(receipt)
    (message,) = scene.stored()[WINDOW]
    assert (message.value, message.properties[env.ID]) == (b"body", fired.receipt.id)
    assert fired.receipt.due_ms <= scene.world.clock.now_ms()
    # With a body, it goes straight to the business topic.
    producer.fire_now(producer.schedule(b"body", deliver_after=FAR), b"new")
    (delivered,) = scene.stored()["orders"]
    assert delivered.value == b"new"
    assert set(delivered.properties) == {env.DUE, env.ID, env.TARGET}


@in_memory
def test_a_message_that_cannot_be_read_back_stays_as_it_is(scene: Scene) -> None:
    producer = scene.producer(max_message_size=16 * 1024)
    receipt = producer.schedule(b"body", deliver_after=FAR)
    before = scene.stored()
    wrong: list[dict[str, Any]] = [
        {"stored_at": ""},
        {"stored_at": f"{receipt.stored_at[:-1]}999"},
        {"id": "other"},
    ]
    for each in wrong:
        with pytest.raises(InvalidInputError, match="the new message's content=; nothing was"):
            producer.reschedule(replace(receipt, **each), deliver_after=NEAR)
    with pytest.raises(MessageTooLargeError):
        producer.reschedule(receipt, bytes(20_000), deliver_after=NEAR)
    with pytest.raises(DelayTooLongError):
        producer.reschedule(receipt, deliver_after=timedelta(days=4))
    assert scene.stored() == before


@pytest.mark.parametrize("world", ["memory"], indirect=True)
def test_a_message_is_read_back_by_its_key_too(scene: Scene) -> None:
    """One ID on two keys is two messages, which may be in one entry."""
    due_ms = scene.world.clock.now_ms() + FAR // timedelta(milliseconds=1)
    producer = scene.producer(batching_enabled=True)
    for key in ("a", "b"):
        options = {"deliver_at": due_ms, "message_id": "order-7", "partition_key": key}
        producer.send_async(f"for {key}".encode(), None, **options)
    producer.flush()
    one, other = scene.stored()[DAYS]
    assert one.position.entry_start == other.position.entry_start
    place = place_of(scene.description.level_topic(0).partition(1).full, one.ledger, one.entry)
    receipt = Receipt("order-7", due_ms, scene.topic, scene.description.topic, "b", place)
    producer.reschedule(receipt, deliver_after=LATER)
    (new,) = scene.stored()[HOURS]
    assert (new.value, new.key) == (b"for b", "b")


@pytest.mark.parametrize("failing", [b"new", b"cancel"])
@in_memory
def test_a_failed_reschedule_loses_no_message(
    scene: Scene, producer: Any, monkeypatch: pytest.MonkeyPatch, failing: bytes
) -> None:
    receipt, store = producer.schedule(b"old", deliver_after=FAR), Broker.store

    def refuse(broker: Broker, name: Any, messages: Any, **options: Any) -> Any:
        if messages[0].value == failing:
            raise pulsar.Timeout("Pulsar error: Timeout")
        return store(broker, name, messages, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Broker, "store", refuse)
        with pytest.raises((pulsar.Timeout, pulsar.asyncio.PulsarException)) as caught:
            producer.reschedule(receipt, b"new", deliver_after=LATER)
    stored = {message.value for messages in scene.stored().values() for message in messages}
    if failing == b"new":
        assert stored == {b"old"}, "nothing is cancelled"
        assert not isinstance(caught.value, CancellationFailedError)
        return
    assert stored == {b"old", b"new"}
    assert isinstance(caught.value, CancellationFailedError)
    assert "its receipt is dl1" in str(caught.value)
    for each in (receipt, Receipt.parse(caught.value.receipt)):
        assert producer.cancel(each).status is OutcomeStatus.ACCEPTED


@in_memory
def test_a_topic_with_deduplication_may_tell_no_position(
    producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.testing.memory.producer.message_id", lambda *_: not_stored())
    for after in (FAR, timedelta(0)):
        found = producer.schedule(b"x", deliver_after=after)
        assert (found.stored_at, found.sent_directly) == ("", not after)
        assert Receipt.parse(str(found)) == found


# -- outcomes


def test_the_last_decision_counts(scene: Scene, producer: Any) -> None:
    one, two = (producer.schedule(b"x", deliver_after=FAR) for _ in range(2))
    assert producer.outcome(one) is None
    writer = scene.outcomes()  # of records that are no outcomes
    writer.send(b"x", partition_key=one.id)
    writer.send(b"x", {"delaylevel.outcome": "lost"}, partition_key=one.id)
    assert producer.outcome(one) is None
    unknown = decided(one, OutcomeStatus.UNKNOWN, "late")
    scene.decide(unknown)
    assert producer.outcome(str(one)) == unknown
    # An outcome from before the call is not its answer.
    assert producer.cancel(one, timeout=0.3).status is OutcomeStatus.ACCEPTED
    scene.decide(
        decided(one, OutcomeStatus.CANCELLED),
        decided(two, OutcomeStatus.TOO_LATE, released_ms=two.due_ms),
        decided(one, OutcomeStatus.UNKNOWN, "a cancellation with another key"),
        decided(one, OutcomeStatus.TOO_LATE, target=scene.world.topic("others")),
    )
    assert producer.outcome(one) == decided(one, OutcomeStatus.CANCELLED)
    assert producer.outcome(two) == decided(two, OutcomeStatus.TOO_LATE, released_ms=two.due_ms)
    # As `pending outcome` shows it.
    found = Outcomes(scene.world.plain_client, scene.world.admin, scene.description)
    assert decided(one, OutcomeStatus.CANCELLED) in found.stored(one.id)


def test_a_cancellation_without_an_outcomes_topic_is_stored(scene: Scene, producer: Any) -> None:
    receipt = producer.schedule(b"x", deliver_after=FAR)
    topic = scene.description.outcomes_topic
    scene.world.admin.delete(topic, force=True)
    outcome = producer.cancel(receipt, timeout=5)
    assert outcome.status is OutcomeStatus.ACCEPTED
    assert f"{topic} does not exist" in outcome.reason
    assert "delaylevel levels create" in outcome.reason
    assert scene.stored()[DAYS][-1].properties[env.KIND] == env.CANCEL
    with pytest.raises(LevelTopicError, match="does not exist: run `delaylevel levels create"):
        producer.outcome(receipt)
    topics.create(scene.world.admin, scene.description)
    scene.decide(decided(receipt, OutcomeStatus.CANCELLED))
    assert producer.outcome(receipt) == decided(receipt, OutcomeStatus.CANCELLED)


# -- replace by ID


def test_replacing_by_id_cancels_what_waits_under_it(scene: Scene, producer: Any) -> None:
    options = {"deliver_after": FAR, "message_id": "invoice-17"}
    Scene(scene.world, "others").producer().schedule(b"x", **options)
    assert producer.schedule(b"x", partition_key="k", replace=True, **options).replaced == ()
    old = producer.schedule(b"pay 10", **options)
    producer.schedule(b"pay 5", deliver_after=FAR, message_id="invoice-1")
    options = {"message_id": "invoice-17", "replace": True}
    other = scene.producer()
    first = other.schedule(b"pay 20", partition_key="k", deliver_after=NEAR, **options)
    assert Receipt.parse(str(first)) == first
    replaced = {(one.id, one.due_ms, one.status) for one in first.replaced}
    assert (old.id, old.due_ms, OutcomeStatus.ACCEPTED) in replaced
    second = producer.schedule(b"30", deliver_after=FAR, **options)
    # That of the first replacement alone: the others are cancelled already.
    assert [(one.id, one.key) for one in second.replaced] == [(first.id, "k")]
    assert len({"invoice-17", first.id, second.id}) == 3
    with pytest.raises(InvalidInputError, match="give message_id"):
        producer.schedule(b"x", deliver_after=FAR, replace=True)
    with pytest.raises(InvalidInputError, match="512"):
        producer.schedule(b"x", deliver_after=FAR, message_id="i" * 512, replace=True)
