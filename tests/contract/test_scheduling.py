"""Contract of scheduling and cancelling: the records that are stored, and the answers to callers.

The producer for threads and the one for asyncio do the same. No dispatcher decides here: tests
publish outcomes themselves, in the form of the wire format.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import JsonSchema, Record, String

from delaylevel import Outcome, OutcomeStatus, Receipt, topics
from delaylevel.cluster.reader import read_range
from delaylevel.errors import (
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
from delaylevel.model.position import EARLIEST
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.outcomes import Outcomes
from support.world import World

HOUR = timedelta(hours=1)
LEVELS = Levels(
    [
        PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=3)),
        # Few partitions: creating one takes a real broker some 25 ms.
        PartitionStrategy(partition_by=timedelta(hours=8), maximum_delay=timedelta(days=1)),
    ]
)
# For the window, the second level, and the first.
NEAR, LATER, FAR = timedelta(minutes=10), timedelta(hours=9), timedelta(days=2, minutes=5)


WORLDS = ("memory", "asyncio", "real")
CLOSED = (pulsar.AlreadyClosed, pulsar.asyncio.PulsarException)
#: For what is refused before anything reaches a broker.
in_memory = pytest.mark.parametrize("world", ["memory", "asyncio"], indirect=True)


class Order(Record):  # type: ignore[misc]
    name = String()


def described(world: World, name: str = "orders", **values: Any) -> LevelTopicDescription:
    """Create the level topic of a business topic."""
    topic = world.topic(name)
    values.setdefault("window_partitions", 2)
    description = LevelTopicDescription(f"{topic}-delay-level", LEVELS, (topic,), **values)
    return topics.create(world.admin, description)


def producer_for(world: World, name: str = "orders", **options: Any) -> Any:
    return world.client().create_producer(
        world.topic(name), enable_delay_level_topic=True, create_level_topic=False, **options
    )


def members(world: World, description: LevelTopicDescription) -> dict[str, list[ParkedMessage]]:
    """Return the messages in the level and window topics that are not empty, by topic."""
    names = [description.level_topic(index).full for index in range(2)]
    found = {name: world.stored(name) for name in (*names, description.window_topic.full)}
    return {name.rpartition("/")[2]: messages for name, messages in found.items() if messages}


def partition_records(world: World, partition: str) -> list[ParkedMessage]:
    last = world.admin.last_message_id(TopicName.parse(partition))
    end = EARLIEST if last is None else last.next_entry
    return list(read_range(world.plain_client, partition, EARLIEST, end))


def everything(world: World, description: LevelTopicDescription) -> list[tuple[str, ParkedMessage]]:
    """Return the messages in the level, window and business topics, each with its topic."""
    names = [description.level_topic(index).full for index in range(2)]
    names += [description.window_topic.full, description.targets[0]]
    return [(name, message) for name in names for message in world.stored(name)]


def publish(world: World, description: LevelTopicDescription, *outcomes: Outcome) -> None:
    producer = world.plain_client.create_producer(description.outcomes_topic.partition(0).full)
    for outcome in outcomes:
        producer.send(outcome.payload(), outcome.properties(), partition_key=outcome.id)
    producer.close()


def decided(receipt: Receipt, status: OutcomeStatus, reason: str = "", **changed: Any) -> Outcome:
    values = {
        "id": receipt.id,
        "target": receipt.target,
        "due_ms": receipt.due_ms,
        "decided_ms": receipt.due_ms + 1,
        "reason": reason,
        "key": receipt.key,
        **changed,
    }
    return Outcome(status, **values)


@pytest.mark.parametrize("batched", [False, True])
def test_a_receipt_tells_where_its_message_is(world: World, batched: bool) -> None:
    description = described(world)
    producer = producer_for(world, batching_enabled=batched)
    receipts = {}
    for index, after in enumerate([NEAR, LATER, FAR, FAR, timedelta(0)]):
        key = f"k{index}" if index % 2 else None
        body = b"%d" % index
        receipts[body] = producer.schedule(body, partition_key=key, deliver_after=after)
    own = producer.schedule(b"own", deliver_after=FAR, message_id="mine")
    receipts[b"own"] = own
    assert own.id == "mine"
    assert len({receipt.id for receipt in receipts.values()}) == 6
    found = {message.value: (topic, message) for topic, message in everything(world, description)}
    for body, receipt in receipts.items():
        assert Receipt.parse(str(receipt)) == receipt
        topic, message = found[body]
        assert receipt.place is not None
        partition, position = receipt.place
        assert partition.startswith(topic)
        assert position == message.position.entry_start
        assert (receipt.key, receipt.id) == (message.key, message.properties[env.ID])
        assert (receipt.target, receipt.level_topic) == (world.topic("orders"), description.topic)
        assert receipt.sent_directly == (body == b"4")
        if not receipt.sent_directly:
            assert str(receipt.due_ms) == message.properties[env.DUE]


@in_memory
def test_a_message_needs_a_due_time(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    with pytest.raises(InvalidDelayError, match="give deliver_at or deliver_after"):
        producer.schedule(b"x")
    with pytest.raises(InvalidDelayError, match="naive"):
        producer.schedule(b"x", deliver_at=datetime(2030, 1, 1))
    with pytest.raises(DelayTooLongError):
        producer.schedule(b"x", deliver_after=timedelta(days=4))
    with pytest.raises(InvalidInputError, match="1 to 512 characters"):
        producer.schedule(b"x", deliver_after=NEAR, message_id="")
    assert everything(world, description) == []


def test_a_cancellation_takes_the_way_of_its_message(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    for after, topic in ((FAR, "orders-delay-level"), (LATER, "orders-delay-level-8h")):
        for key in (None, "Kunde 7"):
            receipt = producer.schedule(b"body", partition_key=key, deliver_after=after)
            given: Any = str(receipt) if key else receipt
            outcome = producer.cancel(given)
            assert outcome == Outcome(
                OutcomeStatus.ACCEPTED,
                receipt.id,
                receipt.target,
                receipt.due_ms,
                key=receipt.key,
            )
            message, record = members(world, description)[topic][-2:]
            assert receipt.place is not None
            assert message.position.entry_start == receipt.place[1]
            assert record.value == b"cancel"
            assert record.key == message.key == (key or "")
            assert record.properties == {
                "delaylevel.kind": "cancel",
                "delaylevel.due": str(receipt.due_ms),
                "delaylevel.target": world.topic("orders"),
                "delaylevel.id": receipt.id,
            }
    assert list(members(world, description)) == ["orders-delay-level", "orders-delay-level-8h"]


@pytest.mark.parametrize("key", [None, "", "Kunde 7"])
@pytest.mark.parametrize("own_id", [None, "mine"])
def test_a_cancellation_in_the_window_goes_to_the_partition_of_its_message(
    world: World, key: str | None, own_id: str | None
) -> None:
    description = described(world, window_partitions=5)
    producer = producer_for(world)
    receipt = producer.schedule(b"", partition_key=key, message_id=own_id, deliver_after=NEAR)
    assert receipt.place is not None
    assert producer.cancel(receipt).status is OutcomeStatus.ACCEPTED
    records = partition_records(world, receipt.place[0])
    assert [record.properties.get(env.KIND) for record in records] == [None, "cancel"]
    assert everything(world, description)[0][1].properties[env.ID] == receipt.id


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("delay", [NEAR, FAR])  # in the window, in a level
def test_a_message_without_an_id_is_cancelled_where_it_was_found(
    world: World, delay: timedelta, key: str | None
) -> None:
    description = described(world, window_partitions=5)
    producer = producer_for(world)
    due_ms = world.clock.now_ms() + delay // timedelta(milliseconds=1)
    producer.send(b"x", deliver_at=due_ms, partition_key=key)
    ((topic, message),) = [
        (partition, message)
        for member in description.members()
        if member.role in (Role.LEVEL, Role.WINDOW)
        for partition in (member.topic.partition(index).full for index in range(member.partitions))
        for message in partition_records(world, partition)
    ]
    own_id = message.stable_id(topic)
    before = everything(world, description)
    # Clients spell positions in different ways, and without a key only the place tells the
    # window partition.
    for position in (own_id, f"{topic}:{message.ledger}:{message.entry}:0"):
        with pytest.raises(InvalidInputError, match=f"delaylevel pending cancel .* {position}"):
            producer.cancel(message_id=position, deliver_at=due_ms, partition_key=key)
    named = Receipt(own_id, due_ms, world.topic("orders"), description.topic, message.key)
    with pytest.raises(InvalidInputError, match="position"):
        producer.reschedule(named, b"y", deliver_after=LATER)
    assert everything(world, description) == before
    place = place_of(topic, message.ledger, message.entry)
    found = Receipt(own_id, due_ms, world.topic("orders"), description.topic, message.key, place)
    assert producer.cancel(found).id == own_id
    assert partition_records(world, topic)[-1].properties[env.ID] == own_id
    again = producer.reschedule(found, deliver_after=LATER)
    assert again.receipt.id != own_id
    (new,) = members(world, description)["orders-delay-level-8h"]
    assert (new.value, new.properties[env.REPLACES]) == (b"x", own_id)


def test_a_cancellation_after_the_due_time_goes_to_the_window(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    due_ms = world.clock.now_ms() - 5000
    outcome = producer.cancel(message_id="mine", deliver_at=due_ms, timeout=0.1)
    assert outcome.status is OutcomeStatus.ACCEPTED
    ((topic, records),) = members(world, description).items()
    assert (topic, records[0].properties[env.ID]) == ("orders-delay-level-window", "mine")
    assert world.stored(world.topic("orders")) == []


def test_a_message_that_was_due_at_once_cannot_be_cancelled(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    past_ms = world.clock.now_ms() - 5000
    for options in ({"deliver_at": past_ms}, {"deliver_after": timedelta(0)}):
        receipt = producer.schedule(b"now", **options)
        outcome = producer.cancel(str(receipt), timeout=timedelta(seconds=5))
        assert outcome.status is OutcomeStatus.TOO_LATE
        assert "straight to its topic" in outcome.reason
        with pytest.raises(InvalidInputError, match="went straight to"):
            producer.reschedule(receipt, deliver_after=NEAR)
    assert members(world, description) == {}
    again = producer.reschedule(receipt, b"again", deliver_after=NEAR)
    assert again.outcome.status is OutcomeStatus.TOO_LATE
    ((_, messages),) = members(world, description).items()
    assert [message.value for message in messages] == [b"again"]


# -- refused


@in_memory
def test_the_broker_cannot_take_a_message_back(world: World) -> None:
    description = described(world, final_window=FinalWindow.BROKER)
    producer = producer_for(world)
    receipt = producer.schedule(b"x", deliver_after=FAR)
    for call in (
        lambda: producer.cancel(receipt),
        lambda: producer.reschedule(receipt, deliver_after=NEAR),
        lambda: producer.fire_now(receipt, b"y"),
        lambda: producer.outcome(receipt),
    ):
        with pytest.raises(LevelTopicError, match=r"final window is 'broker'.*nothing was sent"):
            call()
        with pytest.raises(pulsar.PulsarException):
            call()
    near = producer.schedule(b"x", deliver_after=NEAR)  # the broker has it
    with pytest.raises(LevelTopicError, match="final window is 'broker'"):
        producer.cancel(near)
    assert len(members(world, description)["orders-delay-level"]) == 1


@in_memory
def test_a_receipt_of_another_message_is_refused(world: World) -> None:
    described(world)
    described(world, "others")
    producer, other = producer_for(world), producer_for(world, "others")
    receipt = other.schedule(b"x", deliver_after=FAR)
    for call in (producer.cancel, producer.outcome, producer.fire_now):
        with pytest.raises(InvalidInputError, match=r"for .*others.* use a producer of"):
            call(receipt)
    with pytest.raises(InvalidInputError, match="damaged"):
        producer.cancel(str(receipt)[:-4])
    assert "orders" not in receipt.target


@in_memory
def test_a_closed_producer_cancels_nothing(world: World) -> None:
    described(world)
    producer = producer_for(world)
    receipt = producer.schedule(b"x", deliver_after=FAR)
    producer.cancel(receipt, timeout=0.05)
    producer.close()
    for call in (producer.cancel, producer.outcome, producer.fire_now):
        with pytest.raises(CLOSED):
            call(receipt)
    with pytest.raises(CLOSED):
        producer.cancel(receipt, timeout=1)
    with pytest.raises(CLOSED):
        producer.schedule(b"x", deliver_after=FAR)


# -- reschedule


def test_a_message_is_rescheduled_as_it_was(world: World) -> None:
    description = described(world)
    producer = producer_for(world, schema=JsonSchema(Order))
    receipt = producer.schedule(
        Order(name="ä"),
        {"own": "1"},
        partition_key="k",
        ordering_key="o",
        event_timestamp=1234,
        deliver_after=FAR,
    )
    again = producer.reschedule(str(receipt), deliver_after=LATER)
    assert again.outcome == Outcome(
        OutcomeStatus.ACCEPTED, receipt.id, receipt.target, receipt.due_ms, key="k"
    )
    found = members(world, description)
    old, cancellation = found["orders-delay-level"]
    (new,) = found["orders-delay-level-8h"]
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
    newest = members(world, description)["orders-delay-level"][-1]
    assert newest.properties["delaylevel.replaces"] == again.receipt.id


def test_a_message_is_rescheduled_with_other_contents(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    receipt = producer.schedule(b"old", {"own": "1"}, partition_key="k", deliver_after=FAR)
    kept = producer.reschedule(receipt, b"new", deliver_after=LATER)
    moved = producer.reschedule(kept.receipt, b"newer", {"own": "2"}, "other", deliver_after=LATER)
    messages = members(world, description)["orders-delay-level-8h"]
    by_body = {message.value: message for message in messages}
    assert set(by_body) == {b"new", b"newer", b"cancel"}
    assert (by_body[b"new"].key, by_body[b"newer"].key) == ("k", "other")
    assert (kept.receipt.key, moved.receipt.key) == ("k", "other")
    assert by_body[b"cancel"].key == "k"
    assert by_body[b"newer"].properties["own"] == "2"
    with pytest.raises(InvalidInputError, match="give the payload, too"):
        producer.reschedule(moved.receipt, properties={"own": "3"}, deliver_after=FAR)
    with pytest.raises(InvalidDelayError, match="give deliver_at or deliver_after"):
        producer.reschedule(moved.receipt, b"x")


@in_memory
def test_a_message_is_not_replaced_under_its_own_id(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    receipt = producer.schedule(b"old", None, "k", deliver_after=FAR, message_id="order-17")
    before = everything(world, description)
    for content, key in ((None, None), (b"new", None), (b"new", "k")):
        with pytest.raises(InvalidInputError, match=r"Leave message_id out.*nothing was sent"):
            producer.reschedule(
                receipt, content, partition_key=key, deliver_after=NEAR, message_id="order-17"
            )
    assert everything(world, description) == before
    # With another key, it is another message.
    other = producer.reschedule(
        receipt, b"new", None, "l", deliver_after=NEAR, message_id="order-17"
    )
    assert (other.receipt.id, other.receipt.key) == ("order-17", "l")


@pytest.mark.parametrize("content", [None, b"new"])
def test_a_rescheduled_message_can_expire(world: World, content: bytes | None) -> None:
    description = described(world)
    producer = producer_for(world)

    def newest() -> ParkedMessage:
        messages = members(world, description)["orders-delay-level-8h"]
        return next(each for each in reversed(messages) if each.value != b"cancel")

    after = LATER
    receipt = producer.schedule(b"old", deliver_after=FAR, expires_after=2 * HOUR)
    receipt = producer.reschedule(receipt, content, deliver_after=after).receipt
    kept = newest().properties.get(env.EXPIRES)
    assert kept == (None if content else str(receipt.due_ms + 2 * 3_600_000))
    receipt = producer.reschedule(receipt, content, deliver_after=after, expires_after=HOUR).receipt
    assert newest().properties[env.EXPIRES] == str(receipt.due_ms + 3_600_000)
    at = datetime.fromtimestamp(receipt.due_ms // 1000 + 60, timezone.utc)
    receipt = producer.reschedule(
        receipt, content, deliver_at=receipt.due_ms, expires_at=at
    ).receipt
    assert newest().properties[env.EXPIRES] == str(round(at.timestamp() * 1000))
    before = everything(world, description)
    past_ms = world.clock.now_ms() - 60_000
    for wrong, text in (
        ({"deliver_after": after, "expires_after": timedelta(0)}, "not later than the due time"),
        ({"deliver_after": after, "expires_at": at, "expires_after": HOUR}, "both given"),
        ({"deliver_at": past_ms, "expires_after": timedelta(seconds=1)}, "has expired already"),
    ):
        with pytest.raises(InvalidDelayError, match=text):
            producer.reschedule(receipt, content, **wrong)
    assert everything(world, description) == before


def test_a_message_is_fired_now(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    receipt = producer.schedule(b"body", {"own": "1"}, deliver_after=FAR)
    # Its schema is known to the dispatcher only, so it goes through the window.
    fired = producer.fire_now(receipt)
    ((_, messages),) = [
        item for item in members(world, description).items() if item[0].endswith("-window")
    ]
    assert [message.value for message in messages] == [b"body"]
    assert fired.receipt.due_ms <= world.clock.now_ms()
    assert fired.receipt.id == messages[0].properties[env.ID]
    # With a body, it goes straight to the business topic.
    other = producer.schedule(b"body", deliver_after=FAR)
    producer.fire_now(other, b"new")
    (delivered,) = world.stored(world.topic("orders"))
    assert delivered.value == b"new"
    assert set(delivered.properties) == {env.DUE, env.ID, env.TARGET}


@in_memory
def test_a_message_that_cannot_be_read_back_stays_as_it_is(world: World) -> None:
    description = described(world)
    producer = producer_for(world, max_message_size=16 * 1024)
    receipt = producer.schedule(b"body", deliver_after=FAR)
    assert receipt.place is not None
    gone = Receipt.parse(str(receipt))
    wrong = [
        Receipt(gone.id, gone.due_ms, gone.target, gone.level_topic),
        Receipt(
            gone.id, gone.due_ms, gone.target, gone.level_topic, "", f"{gone.stored_at[:-1]}999"
        ),
        Receipt("other", gone.due_ms, gone.target, gone.level_topic, "", gone.stored_at),
    ]
    before = members(world, description)
    for each in wrong:
        with pytest.raises(InvalidInputError, match="give the new message's body=; nothing was"):
            producer.reschedule(each, deliver_after=NEAR)
    with pytest.raises(MessageTooLargeError):
        producer.reschedule(receipt, bytes(20_000), deliver_after=NEAR)
    with pytest.raises(DelayTooLongError):
        producer.reschedule(receipt, deliver_after=timedelta(days=4))
    assert members(world, description) == before


# -- outcomes


def test_the_last_decision_counts(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    one, two = (producer.schedule(b"x", deliver_after=FAR) for _ in range(2))
    assert producer.outcome(one) is None
    publish(world, description, decided(one, OutcomeStatus.UNKNOWN, "late"))
    found = producer.outcome(str(one))
    assert found == decided(one, OutcomeStatus.UNKNOWN, "late")
    publish(
        world,
        description,
        decided(one, OutcomeStatus.CANCELLED),
        decided(two, OutcomeStatus.TOO_LATE, released_ms=two.due_ms),
        decided(one, OutcomeStatus.UNKNOWN, "a cancellation with another key"),
        decided(one, OutcomeStatus.TOO_LATE, target=world.topic("others")),
    )
    assert producer.outcome(one) == decided(one, OutcomeStatus.CANCELLED)
    assert producer.outcome(two) == decided(two, OutcomeStatus.TOO_LATE, released_ms=two.due_ms)
    # As `pending outcome` shows it.
    listed = Outcomes(world.plain_client, world.admin, description).stored(one.id)
    assert decided(one, OutcomeStatus.CANCELLED) in listed


def test_a_record_that_is_no_outcome_is_passed_over(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    receipt = producer.schedule(b"x", deliver_after=FAR)
    writer = world.plain_client.create_producer(description.outcomes_topic.partition(0).full)
    writer.send(b"x", partition_key=receipt.id)
    writer.send(b"x", {"delaylevel.outcome": "lost"}, partition_key=receipt.id)
    writer.close()
    assert producer.outcome(receipt) is None
    publish(world, description, decided(receipt, OutcomeStatus.CANCELLED))
    assert producer.outcome(receipt) == decided(receipt, OutcomeStatus.CANCELLED)


def test_an_outcome_from_before_the_call_is_not_its_answer(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    receipt = producer.schedule(b"x", deliver_after=FAR)
    publish(world, description, decided(receipt, OutcomeStatus.UNKNOWN))
    assert producer.cancel(receipt, timeout=0.3).status is OutcomeStatus.ACCEPTED
    publish(world, description, decided(receipt, OutcomeStatus.UNKNOWN))
    assert producer.cancel(receipt, timeout=0.3).status is OutcomeStatus.ACCEPTED


def test_a_cancellation_without_an_outcomes_topic_is_stored(world: World) -> None:
    description = described(world)
    producer = producer_for(world)
    receipt = producer.schedule(b"x", deliver_after=FAR)
    world.admin.delete(description.outcomes_topic, force=True)
    outcome = producer.cancel(receipt, timeout=5)
    assert outcome.status is OutcomeStatus.ACCEPTED
    assert f"{description.outcomes_topic} does not exist" in outcome.reason
    assert "delaylevel levels create" in outcome.reason
    _, cancellation = members(world, description)["orders-delay-level"]
    assert cancellation.properties[env.KIND] == env.CANCEL
    with pytest.raises(LevelTopicError, match="does not exist: run `delaylevel levels create`"):
        producer.outcome(receipt)
    topics.create(world.admin, description)
    assert producer.outcome(receipt) is None
    publish(world, description, decided(receipt, OutcomeStatus.CANCELLED))
    assert producer.outcome(receipt) == decided(receipt, OutcomeStatus.CANCELLED)


# --- replace by ID ----------------------------------------------------------------------------


def test_replacing_by_id_cancels_what_waits_under_it(world: World) -> None:
    description = described(world)
    producer, other = producer_for(world), producer_for(world)
    old = producer.schedule(b"pay 10", deliver_after=FAR, message_id="invoice-17")
    producer.schedule(b"pay 5", deliver_after=FAR, message_id="invoice-1")
    first = other.schedule(
        b"pay 20", partition_key="k", deliver_after=NEAR, message_id="invoice-17", replace=True
    )
    assert [(one.id, one.due_ms, one.status) for one in first.replaced] == [
        ("invoice-17", old.due_ms, OutcomeStatus.ACCEPTED)
    ]
    assert Receipt.parse(str(first)) == first
    second = producer.schedule(b"30", deliver_after=FAR, message_id="invoice-17", replace=True)
    # That of the first replacement alone: the first message is cancelled already.
    assert [(one.id, one.key) for one in second.replaced] == [(first.id, "k")]
    assert len({"invoice-17", first.id, second.id}) == 3
    records = [record for found in members(world, description).values() for record in found]
    kinds = [env.Envelope.read(record.properties, "").kind for record in records]
    assert (kinds.count(None), kinds.count(env.CANCEL)) == (4, 2)


def test_nothing_waits_under_an_id(world: World) -> None:
    described(world)
    described(world, "others")
    producer_for(world, "others").schedule(b"x", deliver_after=FAR, message_id="invoice-17")
    producer = producer_for(world)
    receipt = producer.schedule(b"x", deliver_after=FAR, message_id="invoice-17", replace=True)
    assert receipt.replaced == ()
    with pytest.raises(InvalidInputError, match="give message_id"):
        producer.schedule(b"x", deliver_after=FAR, replace=True)
    with pytest.raises(InvalidInputError, match="512"):
        producer.schedule(b"x", deliver_after=FAR, message_id="i" * 512, replace=True)
