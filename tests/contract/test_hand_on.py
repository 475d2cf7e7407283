"""The promises of every host that hands messages on, each once, in memory.

The hosts are the local mover, the Spark job (in its source, and behind a user's steps), the
Function, a drain, and a replay of dead letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import Integer, JsonSchema, Record, String

from delaylevel.cluster.targets.receivers import NO_RECEIVER, NO_TOPIC
from delaylevel.errors import BrokerError
from delaylevel.model.envelope import (
    ATTEMPT,
    DUE,
    EXPIRES,
    ID,
    KIND,
    REASON,
    SCHEMA,
    SOURCE,
    TARGET,
    SchemaRef,
)
from delaylevel.model.level_topic import Expired, FinalWindow, MissingTarget
from delaylevel.model.retries import RETRY_ID
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import Crashed
from support.hand_on import (
    BILLS,
    DAY_MS,
    DEAD,
    HELD,
    HOSTS,
    HOUR_3,
    HOUR_MS,
    LEVEL_TOPIC,
    MOVERS,
    ORDERS,
    Bench,
)

BROKER, TRACKER = FinalWindow.BROKER, FinalWindow.TRACKER
DAY_4 = f"{LEVEL_TOPIC}-partition-4"
MINUTE_MS = 60_000
# Whatever a replay reads was not understood or not delivered before, and does not expire.
READERS = [host for host in HOSTS if host != "replay"]

Make = Callable[..., Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(host: str, final_window: FinalWindow = BROKER, **changes: Any) -> Bench:
        return Bench(host, monkeypatch, final_window=final_window, **changes)

    return make


def own_id(source: str, entry: int, bench: Bench) -> str:
    """Return the ID of a message by the place where it was stored first."""
    log = bench.memory._broker.partition(TopicName.parse(source)).log
    return f"{source.removeprefix('persistent://')}:{log.entries[entry].ledger}:{entry}:-1"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("window", FinalWindow)
@pytest.mark.parametrize("after_ms", [MINUTE_MS, 0, -700])
def test_a_message_is_handed_on_unchanged(
    host: str, window: FinalWindow, after_ms: int, make: Make
) -> None:
    bench = make(host, window)
    own = {"partition_key": "key", "ordering_key": "order", "event_timestamp": 5}
    given = [
        bench.store(b"body", after_ms, **own),
        bench.store(None, after_ms),
        bench.store(b"", after_ms),
    ]
    counter = "window" if window is TRACKER or after_ms > 0 else "due"
    assert bench.hand_on() == {counter: 3}
    assert bench.backlog() == 0
    ids = [own_id(bench.source, entry, bench) for entry in range(3)]
    places = {
        body: (identity, expected, key)
        for body, identity, expected, key in zip(
            (b"body", None, b""), ids, given, ("key", "", ""), strict=True
        )
    }
    found = bench.members()
    assert sum(len(values) for values in found.values()) == 3
    for topic in found:
        for message in bench.stored(topic):
            identity, expected, key = places.pop(message.value)
            properties = dict(message.properties)
            if host == "replay":
                properties.pop(EXPIRES, None)  # it does not expire any more
            assert properties == {**expected, ID: identity}
            keys = (message.key, message.ordering_key, message.event_ms)
            assert keys == (("key", "order", 5) if key else ("", "", 0))
            if window is TRACKER:
                index = bench.description.window_partition(key, identity)
                assert topic == bench.description.window_topic.partition(index).full
            else:
                assert topic == ORDERS
        until_ms = bench.now_ms + after_ms if counter == "window" and window is BROKER else None
        assert set(bench.deliver_at(topic)) == {until_ms}, "the broker holds what is not yet due"


@pytest.mark.parametrize("host", MOVERS)
@pytest.mark.parametrize(
    ("source", "after_ms", "place"),
    [
        (DAY_4, DAY_MS - 1, "hour-partition-22"),
        (DAY_4, DAY_MS + 10 * MINUTE_MS, "hour-partition-22"),
        (DAY_4, 3 * DAY_MS, "partition-2"),
        # The lead of a level is used up by a message that comes from it.
        (DAY_4, 64 * MINUTE_MS, "hour-partition-0"),
        (HOUR_3, 64 * MINUTE_MS, None),
        (HELD, 64 * MINUTE_MS, None),
        (HOUR_3, 5 * HOUR_MS, "hour-partition-4"),
        (HOUR_3, 3 * DAY_MS, "partition-2"),
        (HELD, 5 * HOUR_MS, "hour-partition-4"),
    ],
)
def test_a_message_that_is_not_near_due_is_parked_again(
    host: str, source: str, after_ms: int, place: str | None, make: Make
) -> None:
    bench = make(host)
    given = bench.store(b"early", after_ms, source=source, given={ID: "mine"})
    if place is None:
        assert bench.hand_on() == {"window": 1}
        return
    topic = f"{LEVEL_TOPIC}-{place}"
    hour = "hour" in place
    assert bench.hand_on() == {"parked": 1}
    assert bench.backlog(source) == 0
    assert bench.members(source) == {topic: [b"early"]}
    assert dict(bench.stored(topic)[0].properties) == given
    units = int(place.rpartition("-")[2]) + 1
    hand_off_ms = units * HOUR_MS - 5 * MINUTE_MS if hour else units * DAY_MS - 10 * MINUTE_MS
    until_ms = bench.now_ms + hand_off_ms if host == "function" else None
    assert bench.deliver_at(topic) == [until_ms], "only the broker of a Function holds it"


def test_a_message_that_the_broker_would_release_at_once_is_not_parked_again(make: Make) -> None:
    second, longest = timedelta(seconds=1), timedelta(seconds=9)
    levels = Levels([PartitionStrategy(partition_by=second, maximum_delay=longest)])
    bench = make("function", levels=levels)
    bench.store(b"soon", 1500, source=f"{LEVEL_TOPIC}-partition-0")
    assert bench.hand_on() == {"window": 1}
    assert bench.deliver_at(ORDERS) == [bench.now_ms + 1500]


def test_a_drain_parks_nothing_again(make: Make) -> None:
    for window in FinalWindow:
        bench = make("drain", window)
        bench.store(b"early", 5 * DAY_MS)
        assert bench.hand_on() == {"window": 1}
        (topic,) = bench.members()
        assert topic == ORDERS or "-window-" in topic


@pytest.mark.parametrize("host", READERS)
@pytest.mark.parametrize("window", FinalWindow)
def test_what_cannot_be_understood_is_a_dead_letter_between_the_others(
    host: str, window: FinalWindow, make: Make
) -> None:
    bench = make(host, window)
    bench.store(b"first")
    due = {DUE: str(bench.now_ms)}
    wrong: list[tuple[dict[str, str], str]] = [
        ({}, "delaylevel.due is missing"),
        ({DUE: "soon", TARGET: ORDERS}, "not a whole number"),
        ({**due, TARGET: "persistent://x/y/z"}, "target persistent://x/y/z is not one of"),
        ({**due, TARGET: LEVEL_TOPIC}, "is not one of level topic"),
        ({**due, TARGET: ORDERS, KIND: "teleport", ID: "a"}, "does not know this kind"),
    ]
    if window is BROKER:
        cancel = {**due, TARGET: ORDERS, KIND: "cancel", ID: "a"}
        wrong.append((cancel, "no dispatcher decides about such records"))
    for number, (properties, _) in enumerate(wrong):
        bench.store(b"%d" % number, None, given=properties, partition_key="k")
    bench.store(b"last")
    assert bench.hand_on() == {"window": 2, "dead": len(wrong)}
    assert bench.backlog() == 0
    # In a Function, some wait until the description is read again.
    letters = sorted(bench.stored(DEAD), key=lambda letter: letter.value or b"")
    for number, (letter, (given, why)) in enumerate(zip(letters, wrong, strict=True)):
        assert (letter.value, letter.key) == (b"%d" % number, "k")
        properties = dict(letter.properties)
        assert why in properties.pop(REASON)
        assert properties.pop(SOURCE) == own_id(bench.source, number + 1, bench)
        assert properties == {"color": "red", **given}
    others = [value for values in bench.members(DEAD).values() for value in values]
    assert sorted(map(str, others)) == ["b'first'", "b'last'"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("key", ["", "k"])
def test_a_cancellation_goes_to_the_window_partition_of_its_message(
    host: str, key: str, make: Make
) -> None:
    """Neither its due time nor its target lets it out."""
    bench = make(host, TRACKER)
    window = bench.description.window_topic
    direct = f"{window.partition(2).full.removeprefix('persistent://')}:7:1:-1"
    for number, name in enumerate(("a", direct)):
        kind = {KIND: "cancel", ID: name}
        bench.store(b"%d" % number, number * MINUTE_MS - 1, given=kind, partition_key=key or None)
    # Steps see no cancellations, so they are not among the rows that Spark counts.
    assert bench.hand_on() == ({} if host == "steps" else {"window": 2})
    hashed = bench.description.window_partition(key, "a")
    expected: dict[str, list[bytes]] = {}
    for body, index in ((b"0", hashed), (b"1", hashed if key else 2)):
        expected.setdefault(window.partition(index).full, []).append(body)
    assert bench.members() == expected


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("why", [NO_TOPIC, NO_RECEIVER, "TopicTerminated"])
def test_a_message_is_held_while_its_target_cannot_be_written(
    host: str, why: str, make: Make
) -> None:
    bench = make(host)
    if why != NO_TOPIC:
        bench.subscribe(BILLS)
    if why == NO_RECEIVER:
        bench.memory.admin.delete_subscription(TopicName.parse(BILLS), "app")
    elif why == "TopicTerminated":
        bench.memory.admin.terminate(TopicName.parse(BILLS))
    given = bench.store(b"bill", target=BILLS, given={ID: "mine"})
    bench.store(b"order")
    assert bench.hand_on() == {"held": 1, "window": 1}
    assert bench.backlog() == 0
    assert bench.members() == {HELD: [b"bill"], ORDERS: [b"order"]}
    (held,) = bench.stored(HELD)
    assert why in held.properties[REASON]
    properties = {**held.properties, EXPIRES: "", REASON: ""}
    assert properties == {**given, ATTEMPT: "1", EXPIRES: "", REASON: ""}
    pause_ms = bench.description.hold_pause_ms
    assert bench.deliver_at(HELD) == [bench.now_ms + pause_ms if host == "function" else None]
    if host == "replay":  # it reads no held messages
        return
    bench.pause()
    assert bench.hand_on() == {"held": 1}
    attempts = [each.properties[ATTEMPT] for each in bench.stored(HELD)]
    assert attempts == ["1", "2"]
    if why == "TopicTerminated":
        return
    bench.subscribe(BILLS)
    bench.pause()
    assert bench.hand_on() == {"due": 1}
    assert dict(bench.stored(BILLS)[0].properties) == given, "with a trace of the hold"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("policy", MissingTarget)
def test_a_target_that_does_not_exist_is_treated_by_its_policy(
    host: str, policy: MissingTarget, make: Make
) -> None:
    bench = make(host, on_missing_target=policy)
    bench.subscribe(BILLS)
    bench.memory.admin.terminate(TopicName.parse(BILLS))
    bench.memory.admin.delete(TopicName.parse(ORDERS), force=True)
    bench.store(b"order")
    bench.store(b"retry", given={RETRY_ID: "id"})  # its original is acknowledged
    bench.store(b"refused", target=BILLS)
    counts = bench.hand_on()
    assert (
        counts
        == {
            MissingTarget.HOLD: {"held": 3},
            MissingTarget.DEAD_LETTER: {"dead": 2, "held": 1},
            MissingTarget.DROP: {"dropped": 1, "dead": 1, "held": 1},
        }[policy]
    )
    held = [each.value for each in bench.stored(HELD)]
    assert held == ([b"order", b"retry"] if policy is MissingTarget.HOLD else []) + [b"refused"]


@pytest.mark.parametrize("host", READERS)
@pytest.mark.parametrize("policy", Expired)
def test_an_expired_message_is_not_handed_off(host: str, policy: Expired, make: Make) -> None:
    bench = make(host, expired=policy, expire_after_ms=5_000)
    bench.store(b"default", -5_000)
    bench.store(b"in time", -4_999)
    bench.store(b"own", -1_000, given={EXPIRES: str(bench.now_ms)})
    bench.store(b"own, in time", -60_000, given={EXPIRES: str(bench.now_ms + 1)})
    bench.store(b"not due", MINUTE_MS, given={EXPIRES: str(bench.now_ms - 1)})
    held = {EXPIRES: str(bench.now_ms), ATTEMPT: "1"}
    bench.store(b"held", -60_000, given=held, source=HELD)
    assert bench.hand_on() == {"due": 2, "expired": 4}
    assert (bench.backlog(), bench.backlog(HELD)) == (0, 0)
    delivered = bench.stored(ORDERS)
    assert sorted(str(each.value) for each in delivered) == ["b'in time'", "b'own, in time'"]
    assert not any(EXPIRES in each.properties for each in delivered)
    letters = bench.stored(DEAD)
    assert len(letters) == (4 if policy is Expired.DEAD_LETTER else 0)
    assert all(each.properties[REASON].startswith("expired at ") for each in letters)
    assert all(each.properties[TARGET] == ORDERS for each in letters)


@pytest.mark.parametrize("host", HOSTS)
def test_a_message_too_large_for_its_target_is_a_dead_letter(host: str, make: Make) -> None:
    bench = make(host)
    given = bench.store(b"large", given={ID: "mine"})
    bench.store(b"small")
    bench.unstored[b"large", ORDERS] = pulsar.MessageTooBig("too big")
    assert bench.hand_on() == {"dead": 1, "window": 1}, "the target is not at fault"
    letter = dict(bench.stored(DEAD)[-1].properties)
    if host == "replay":
        del letter[EXPIRES]
    assert letter == {**given, REASON: f"too large for {ORDERS}"}
    assert bench.backlog(HOUR_3) == 0


#: The final window, the due time, and a topic of our own that gets the message.
OURS = [
    (BROKER, 5 * HOUR_MS, f"{LEVEL_TOPIC}-hour-partition-4"),
    (TRACKER, 0, f"{LEVEL_TOPIC}-window-partition-"),
    (BROKER, 0, HELD),
    (BROKER, None, DEAD),
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("how", ["unconfirmed", "refused"])
@pytest.mark.parametrize(("window", "after_ms", "topic"), OURS)
def test_nothing_is_acknowledged_while_a_topic_of_our_own_does_not_confirm(
    host: str, how: str, window: FinalWindow, after_ms: int | None, topic: str, make: Make
) -> None:
    if (host == "drain" and after_ms) or (host == "replay" and topic == DEAD):
        return  # it does not write to that topic
    bench = make(host, window)
    if topic.endswith("-"):
        topic += str(bench.description.window_partition("k", ""))
    target = BILLS if topic == HELD else ORDERS
    bench.store(b"mine", after_ms, target=target, partition_key="k")
    if how == "refused":
        bench.unopened[topic] = pulsar.AuthorizationError("no")
    else:
        bench.unstored[topic] = pulsar.Timeout("late")
    with pytest.raises(BrokerError, match=r"AuthorizationError|Timeout"):
        bench.hand_on()
    assert bench.backlog() == 1
    assert bench.members() == {}
    bench.unstored.clear()
    bench.unopened.clear()
    bench.memory.clock.advance(timedelta(days=1))
    bench.now_ms = bench.memory.clock.now_ms()
    counts = bench.hand_on()
    assert sum(counts.values()) == 1, "it counts once"
    if after_ms:
        assert counts == {"due": 1}, "not routed by the present time"
    assert bench.backlog() == 0
    assert sum(len(values) for values in bench.members().values()) == 1


class First(Record):
    number = Integer(required=True)


class Second(Record):
    number = Integer(required=True)
    name = String(default="?", required_default=True)


@pytest.mark.parametrize("host", HOSTS)
def test_a_message_arrives_with_its_version_of_the_schema(host: str, make: Make) -> None:
    bench = make(host)
    client = bench.memory.client()
    references = []
    for record in (First, Second):
        schema = JsonSchema(record)
        client.create_producer(ORDERS, schema=schema).close()
        references.append(str(SchemaRef.of("JSON", schema.schema_info().schema())))
    lacking = str(SchemaRef("AVRO", "0" * 16))
    for number, reference in enumerate([*references, "", lacking, references[0]]):
        bench.store(b"%d" % number, 0, given={SCHEMA: reference} if reference else {})
    assert bench.hand_on() == {"due": 4, "held": 1}
    versions = {each.value: each.schema_version for each in bench.stored(ORDERS)}
    assert versions == {b"0": 0, b"1": 1, b"2": None, b"4": 0}
    (held,) = bench.stored(HELD)
    assert held.properties[REASON] == f"its registry has no schema {lacking}"
    assert held.properties[SCHEMA] == lacking


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("window", FinalWindow)
def test_a_host_may_end_after_any_event(host: str, window: FinalWindow, make: Make) -> None:
    """Another process goes on: nothing is lost, and without an end nothing is copied."""
    event = 0
    while True:
        event += 1
        bench = make(host, window)
        bodies = {b"due", b"near", b"early", b"bill"}
        bench.store(b"due", -1)
        bench.store(b"near")
        bench.store(b"early", 5 * HOUR_MS)
        bench.store(b"bill", target=BILLS)
        if host != "replay":
            bodies.add(b"unreadable")
            bench.store(b"unreadable", None)
        bench.memory.crash_after(event)
        crashed = False
        try:
            bench.hand_on()
        except Crashed:
            crashed = True
            bench.memory.crash_after(None)
            bench.hand_on()
        bench.memory.crash_after(None)
        found = Counter(value for values in bench.members().values() for value in values)
        assert found.keys() == bodies, "lost"
        assert bench.backlog() == 0
        assert crashed or set(found.values()) == {1}, "copied"
        bench.memory.close()
        if not crashed:
            break
    assert event > len(bodies)
