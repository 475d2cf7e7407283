"""Generator of spec/vectors.json, the test cases of the wire format, from the code.

python tools/make_vectors.py            # write the file
python tools/make_vectors.py --check    # exit with 1 if the file is not up to date

docs/wire.md describes the sections. A case has a name, its input and the expected answer.
``ANSWERS`` computes the answer of a case of each section; ``INPUTS`` lists the cases.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from delaylevel.cluster.port import SchemaVersion
from delaylevel.cluster.schemas import canonical, registered_reference
from delaylevel.errors import (
    DelayLevelError,
    DelayTooLongError,
    EnvelopeError,
    InvalidDelayError,
    InvalidInputError,
    LevelTopicError,
    MessageTooLargeError,
    TargetNotAllowedError,
    UnsupportedOptionError,
    UpgradeRequiredError,
)
from delaylevel.model import envelope as env
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    PLAN_PROPERTY,
    TARGET_PREFIX,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
    Mover,
    default_level_topics,
)
from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt, cancellation
from delaylevel.model.router import Hop, Router
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import hop
from delaylevel.producer.checks import SizeLimit
from delaylevel.producer.routing import WINDOW, Routing
from delaylevel.producer.setup import level_producer_settings, window_producer_settings

FILE = Path(__file__).resolve().parents[1] / "spec" / "vectors.json"

Case = dict[str, Any]

# 2026-01-01T00:00:00Z, and a time that is no multiple of any unit.
NEW_YEAR = 1_767_225_600_000
ODD = 1_784_567_891_234

_DAY_MS = 86_400_000
_HOUR_MS = 3_600_000

# The most special class first. The names are those of docs/wire.md.
_REFUSALS: tuple[tuple[type[Exception], str], ...] = (
    (DelayTooLongError, "delay-too-long"),
    (InvalidDelayError, "invalid-delay"),
    (UnsupportedOptionError, "unsupported-option"),
    (MessageTooLargeError, "message-too-large"),
    (TargetNotAllowedError, "target-not-allowed"),
    (UpgradeRequiredError, "upgrade-required"),
    (LevelTopicError, "level-topic"),
    (InvalidInputError, "invalid-input"),
)


class _FixedClock:
    """A clock that has stopped."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits here")


# -- descriptions


def _days(days: float) -> timedelta:
    return timedelta(days=days)


_LEVELS = {
    "days": Levels(PartitionStrategy()),
    "year of days": Levels(
        PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=_days(365))
    ),
    "days and hours": Levels(
        [
            PartitionStrategy(),
            PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=_days(1)),
        ]
    ),
    "year to minutes": Levels(
        [
            PartitionStrategy(
                partition_by=PartitionBy.YEAR, maximum_delay=_days(3650), overflow="recirculate"
            ),
            PartitionStrategy(partition_by=PartitionBy.MONTH, maximum_delay=_days(365)),
            PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=_days(30)),
            PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=_days(1)),
            PartitionStrategy(partition_by=PartitionBy.MINUTE, maximum_delay=timedelta(hours=1)),
        ]
    ),
    "hours, recirculating": Levels(
        PartitionStrategy(
            partition_by=PartitionBy.HOUR, maximum_delay=_days(2), overflow="recirculate"
        )
    ),
    "a part of a unit": Levels(
        PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(minutes=150))
    ),
    "own units": Levels(
        [
            PartitionStrategy(
                partition_by=timedelta(minutes=90),
                maximum_delay=timedelta(hours=9),
                lead=timedelta(minutes=2),
            ),
            PartitionStrategy(
                partition_by=timedelta(seconds=2, milliseconds=500),
                maximum_delay=timedelta(hours=1.5),
                lead=timedelta(milliseconds=625),
                partition_limit=10_000,
            ),
        ]
    ),
    "shortest unit": Levels(
        PartitionStrategy(
            partition_by=timedelta(milliseconds=100), maximum_delay=timedelta(seconds=1)
        )
    ),
}

_ORDERS = "persistent://public/default/orders"


def _description(name: str, **options: Any) -> LevelTopicDescription:
    given: dict[str, Any] = {
        "topic": "persistent://public/default/_orders-delay-level",
        "levels": _LEVELS[name],
        "targets": (_ORDERS,),
    }
    return LevelTopicDescription(**{**given, **options})


#: The level topics of the cases, by the names that the cases use.
DESCRIPTIONS: dict[str, LevelTopicDescription] = {
    **{name: _description(name) for name in _LEVELS},
    "days, Function": _description("days", mover=Mover.FUNCTION),
    "days and hours, Function": _description("days and hours", mover=Mover.FUNCTION),
    "year to minutes, Function": _description("year to minutes", mover=Mover.FUNCTION),
    "days, broker": _description("days", final_window=FinalWindow.BROKER),
    "days and hours, broker, Function": _description(
        "days and hours", mover=Mover.FUNCTION, final_window=FinalWindow.BROKER
    ),
    "several targets": _description(
        "days",
        targets=(_ORDERS, "persistent://acme/eu/invoices", "persistent://public/default/rück"),
        window_partitions=16,
    ),
    "expanded": _description("year of days", former=(_LEVELS["days"],)),
    "other settings": _description(
        "days and hours",
        topic="persistent://acme/levels/acme.eu.invoices-delay-level",
        targets=("persistent://acme/eu/invoices",),
        hold_pause_ms=1500,
        window_partitions=64,
        on_missing_target=MissingTarget.DEAD_LETTER,
    ),
    "days and hours, Function, 64 window partitions": _description(
        "days and hours", mover=Mover.FUNCTION, window_partitions=64
    ),
    "hours, recirculating, 16 window partitions": _description(
        "hours, recirculating", window_partitions=16
    ),
    "earlier name": _description(
        "days", topic="persistent://public/default/orders-delay-level", window_partitions=1
    ),
}


def _described(description: LevelTopicDescription) -> dict[str, Any]:
    """Return the meaning of a description, for comparison by other languages."""
    return {
        "overflow": description.levels.overflow,
        "mover": description.mover.value,
        "final_window": description.final_window.value,
        "targets": list(description.targets),
        "window_partitions": description.window_partitions,
        "maximum_ms": description.levels.maximum_ms,
        "smallest_lead_ms": description.levels.smallest_lead_ms,
        "levels": [
            {
                "topic": description.level_topic(level.index).full,
                "partitions": level.partitions,
                "unit_ms": level.unit_ms,
                "lead_ms": level.lead_ms,
            }
            for level in description.levels
        ],
        "members": [
            {"topic": member.topic.full, "role": member.role.value, "partitions": member.partitions}
            for member in description.members()
        ],
    }


def _description_inputs() -> Iterator[Case]:
    for name, description in DESCRIPTIONS.items():
        properties = description.to_properties()
        yield {"name": name, "topic": description.topic, "properties": properties}
    days = DESCRIPTIONS["days"]
    stored = json.loads(days.to_json())

    def changed(name: str, topic: str = days.topic, **values: Any) -> Case:
        text = json.dumps({**stored, **values}, sort_keys=True, separators=(",", ":"))
        return {"name": name, "topic": topic, "properties": {DESCRIPTION_PROPERTY: text}}

    def without(member: str) -> Case:
        rest = {key: value for key, value in stored.items() if key != member}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        return {
            "name": f"without {member}",
            "topic": days.topic,
            "properties": {DESCRIPTION_PROPERTY: text},
        }

    added = TARGET_PREFIX + "persistent://public/default/added"
    case = changed("a target of its own property")
    yield {**case, "properties": {**case["properties"], added: "1"}}
    yield changed("an unknown member is ignored", remark="for later versions")
    yield changed("a default expiry", expire_after_ms=_HOUR_MS, expired="dead-letter")
    pause, over = {"*": 1_800_000_000_000}, {_ORDERS: [1_800_000_000_000, 600_000]}
    yield changed("a pause of all targets, and the end of another one", paused=pause, resumed=over)
    yield {"name": "an ordinary topic", "topic": days.topic, "properties": {}}
    plan = {PLAN_PROPERTY: days.to_json(), "delaylevel.member-of": days.topic}
    yield {"name": "an unfinished level topic", "topic": days.topic, "properties": plan}
    yield changed("a newer format", version=99)
    yield changed("the next format, with other members", version=2, levels={}, tides=[1])
    yield changed("format 0", version=0)
    yield changed("a negative format", version=-1)
    yield changed("a format as text", version="1")
    yield changed("a format as a truth value", version=True)
    yield changed("no format", version=None)
    yield changed("an unknown mover", mover="pigeon")
    yield changed("an unknown final window", final_window="drawer")
    yield changed("an unknown overflow", overflow="clamp")
    yield changed("targets are no list", targets=_ORDERS)
    yield changed("no targets", targets=[])
    yield changed("too many window partitions", window_partitions=65)
    yield changed("no window partitions", window_partitions=0)
    yield changed("no levels", levels=[])
    for member in ("version", "levels", "overflow", "targets", "mover", "final_window"):
        yield without(member)
    day = stored["levels"][0]
    yield changed("a lead as long as the unit", levels=[{**day, "lead_ms": _DAY_MS}])
    yield changed("a lead of zero", levels=[{**day, "lead_ms": 0}])
    yield changed("a unit that is too short", levels=[{**day, "unit_ms": 99, "lead_ms": 10}])
    yield changed("a maximum of one unit", levels=[{**day, "maximum_ms": _DAY_MS}])
    yield changed("a maximum beyond 100 years", levels=[{**day, "maximum_ms": 36_501 * _DAY_MS}])
    hour = {"unit_ms": _HOUR_MS, "maximum_ms": _DAY_MS, "lead_ms": 300_000}
    yield changed("levels from fine to coarse", levels=[hour, day])
    yield changed("a gap between levels", levels=[day, {**hour, "maximum_ms": _DAY_MS - 1}])
    for name, text in (("damaged JSON", "{"), ("a JSON list", "[]"), ("no text", "")):
        yield {"name": name, "topic": days.topic, "properties": {DESCRIPTION_PROPERTY: text}}


def _description_answer(case: Case) -> Any:
    found = LevelTopicDescription.from_properties(case["topic"], case["properties"])
    return None if found is None else _described(found)


# -- names


def _name_inputs() -> Iterator[Case]:
    for topic in ("orders", "public/default/orders", _ORDERS, "persistent://acme/eu/Bestellung ü"):
        yield {"name": topic, "topic": topic, "level_namespace": None}
    for namespace in ("public/default", "acme/levels"):
        name = f"orders, with levels in {namespace}"
        yield {"name": name, "topic": "orders", "level_namespace": namespace}
    for topic in ("", "a/b", "a/b/c/d", "persistent://orders", "a//c", "non-persistent://a/b/c"):
        yield {"name": f"not a topic: {topic!r}", "topic": topic, "level_namespace": None}


def _name_answer(case: Case) -> Any:
    names = default_level_topics(case["topic"], case["level_namespace"])
    return {"target": TopicName.parse(case["topic"]).full, "level_topics": list(names)}


# -- routes


def _delays(levels: Levels) -> list[int]:
    """Return the delays on both sides of every bound of a list of levels, in ms."""
    found = {-_DAY_MS, -1, 0, 1, 50, levels.maximum_ms * 2, levels.maximum_ms * 3 + 17}
    for level in levels:
        last = level.partitions - 1
        units = {1, 2, 3, (last + 1) // 2 + 1, last, last + 1, last + 2}
        bounds = {count * level.unit_ms for count in units}
        bounds |= {level.maximum_ms, level.unit_ms - level.lead_ms, level.near_due_ms}
        found |= {bound + by for bound in bounds for by in (-1, 0, 1)}
    return sorted(found)


def _route_inputs() -> Iterator[Case]:
    for name, description in DESCRIPTIONS.items():
        if name in ("several targets", "other settings", "earlier name", "expanded"):
            continue
        for delay in _delays(description.levels):
            yield _route(f"{name}: {delay} ms", name, NEW_YEAR, NEW_YEAR + delay)
    for delay in (30 * _DAY_MS, 30 * _DAY_MS + 1, 365 * _DAY_MS, 365 * _DAY_MS + 1):
        yield _route(f"expanded: {delay} ms", "expanded", ODD, ODD + delay)
    yield _route("not delayed", "days", NEW_YEAR, None)
    yield _route("a due time of zero is no delay", "days", NEW_YEAR, 0)
    wrong = {
        "negative": -1,
        "seconds": NEW_YEAR // 1000 + 86_400,
        "just below the year 1973": 99_999_999_999,
        "the first time that counts": 100_000_000_000,
        "microseconds": NEW_YEAR * 1000,
        "the last millisecond of 9999": 253_402_300_799_999,
        "the year 10000": 253_402_300_800_000,
    }
    for text, due in wrong.items():
        yield _route(f"due: {text}", "hours, recirculating", NEW_YEAR, due)
    for key, own in (("customer-7", None), (None, "order-1"), ("customer-7", "order-1"), ("", "x")):
        for name in ("days", "days and hours, Function", "days, broker"):
            text = f"{name}: an hour, key {key!r}, ID {own!r}"
            yield _route(text, name, ODD, ODD + _HOUR_MS // 2, key=key, own_id=own)
    for name in ("several targets", "other settings", "earlier name"):
        target = DESCRIPTIONS[name].targets[0]
        for delay in (1000, 2 * _HOUR_MS, 2 * _DAY_MS):
            text = f"{name}: {delay} ms"
            yield _route(text, name, ODD, ODD + delay, key="customer-7", target=target)
    elsewhere = "persistent://public/default/elsewhere"
    yield _route("a foreign target", "days", ODD, ODD + _DAY_MS, target=elsewhere)
    for text, own in {"empty": "", "longest": "x" * 512, "too long": "x" * 513}.items():
        yield _route(f"ID: {text}", "days", ODD, ODD + _DAY_MS, own_id=own)


def _route(
    name: str,
    level_topic: str,
    now: int,
    due: int | None,
    *,
    key: str | None = None,
    own_id: str | None = None,
    target: str = _ORDERS,
) -> Case:
    return {
        "name": name,
        "level_topic": level_topic,
        "target": target,
        "now": now,
        "due": due,
        "key": key,
        "id": own_id,
    }


def _route_answer(case: Case) -> Any:
    description = DESCRIPTIONS[case["level_topic"]]
    description.check_target(case["target"])
    routing = Routing(description, case["target"], None, _FixedClock(case["now"]))
    route = routing.route(case["due"], None, None, case["id"], case["key"])
    topic, partition = case["target"], None
    if route.level == WINDOW:
        topic = description.window_topic.full
        partition = route.partition if case["key"] or case["id"] else "any"
    elif route.parked:
        topic, partition = description.level_topic(route.level).full, route.partition
    return {"topic": topic, "partition": partition, "deliver_at": route.deliver_at_ms}


# -- window partitions


def _window_inputs() -> Iterator[Case]:
    keys = ("a", "customer-7", "Käse", "日本", "\U0001f600", "a\u0000b", " ", "x" * 300, "e\u0301")
    for key in keys:
        for partitions in (1, 3, 4, 64):
            yield _window(key, "ignored with a key", partitions)
    own = "public/default/_orders-delay-level-partition-3:17:4:-1"
    for each in (own, "order-1", "Auftrag-Ä"):
        for partitions in (1, 4, 7):
            yield _window("", each, partitions)
    yield {"name": "neither key nor ID", "key": "", "id": None, "partitions": 4}


def _window(key: str, own: str, partitions: int) -> Case:
    shown = key[:20] if key else f"no key, {own}"
    name = f"{shown!r} of {partitions}"
    return {"name": name, "key": key, "id": own, "partitions": partitions}


def _window_answer(case: Case) -> Any:
    if not case["key"] and not case["id"]:
        return "any"
    description = _description("days", window_partitions=case["partitions"])
    return description.window_partition(case["key"], case["id"])


# -- schemas

_AVRO = """{"type":"record","name":"Order","namespace":"shop","fields":[
  {"name":"id","type":["null","string"],"default":null},
  {"name":"amount","type":"double","default":1.5},
  {"name":"note","type":"string","default":"Größe \\u00e9 \\ud83d\\ude00 \\/ \\"x\\" \\\\ \\t"}]}"""


def _schema_inputs() -> Iterator[Case]:
    def case(name: str, kind: str, definition: str) -> Case:
        return {"name": name, "type": kind, "definition": definition}

    yield case("Avro", "AVRO", _AVRO)
    yield case("JSON with the same definition", "JSON", _AVRO)
    order = json.loads(_AVRO)
    backwards = dict(reversed(order.items()))
    yield case("other order of members", "AVRO", json.dumps(backwards))
    yield case("other white space", "AVRO", json.dumps(order, indent=2))
    yield case("escaped characters", "AVRO", json.dumps(order))
    yield case("plain characters", "AVRO", json.dumps(order, ensure_ascii=False))
    yield case(
        "other order of fields", "AVRO", json.dumps({**order, "fields": order["fields"][1:]})
    )
    native = {
        "fileDescriptorSet": "CgV0ZXN0",
        "rootMessageTypeName": "shop.Order",
        "rootFileDescriptorName": "order.proto",
    }
    yield case("Protobuf native", "PROTOBUF_NATIVE", json.dumps(native))
    yield case("Protobuf", "PROTOBUF", _AVRO)
    for kind in ("STRING", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE"):
        yield case(f"primitive {kind}", kind, "")
    yield case("a primitive type as null", "STRING", "null")
    yield case("a primitive type as an object", "STRING", "{}")
    yield case("not JSON", "PROTOBUF_NATIVE", 'syntax = "proto3";')
    for number in (
        "0", "-0", "7", "-12345678901234567890", "1.0", "1.50", "-0.0", "1e2", "1E2", "1e15",
        "1e16", "123456789012345680.0", "0.0001", "0.00001", "1e-7", "2e-3", "1e22", "1e23",
        "5e-324", "1.7976931348623157e308", "0.1", "0.30000000000000004", "100.0",
        "12345.678e10", "9007199254740993.0",
    ):  # fmt: skip
        yield case(f"the number {number}", "AVRO", f'{{"default":{number}}}')
    for name, text in {
        "control characters": '"\\u0000\\u001f\\u007f\\b\\f\\n\\r\\t"',
        "a lone surrogate": '"\\ud800"',
        "letters by code point": '{"b":1,"a":2,"B":3,"ä":4,"\U0001f600":5,"\uffee":6}',
        "empty containers": '[[],{},"",null,true,false]',
        "a name twice": '{"a":1,"b":2,"a":3}',
    }.items():
        yield case(name, "AVRO", text)


def _schema_answer(case: Case) -> Any:
    text = canonical(case["definition"])
    return {"canonical": text, "reference": str(SchemaRef.of(case["type"], text))}


def _registered_inputs() -> Iterator[Case]:
    order = json.loads(_AVRO)
    own = json.dumps(order)
    noted = json.dumps({**order, "doc": "An order", "aliases": ["Purchase"]})
    fields = [{**field, "doc": field["name"]} for field in order["fields"]]
    noted_fields = json.dumps({**order, "fields": fields})
    value = {"type": "map", "values": "string", "default": {"doc": "a value, not a note"}}
    with_map = json.dumps({**order, "fields": [{"name": "m", **value}]})
    other_map = json.dumps({**order, "fields": [{"name": "m", **value, "default": {}}]})

    def case(name: str, definition: str, *stored: str, kind: str = "AVRO") -> Case:
        versions = [{"type": "AVRO", "definition": each} for each in stored]
        return {"name": name, "type": kind, "definition": definition, "versions": versions}

    yield case("the same text", own, own)
    yield case("other white space", own, json.dumps(order, indent=2))
    yield case("other notes", own, noted)
    yield case("other notes of the client", noted, own)
    yield case("notes of fields", own, noted_fields)
    yield case("the text itself comes before notes", own, noted, own)
    yield case("the first version that is equal", own, noted, noted_fields)
    yield case("a default is not a note", with_map, other_map)
    yield case("no version", own)
    yield case("another type", own, own, kind="JSON")
    yield case("not JSON", "syntax", "syntax")


def _registered_answer(case: Case) -> Any:
    versions = [
        SchemaVersion(each["type"], each["definition"], number)
        for number, each in enumerate(case["versions"])
    ]
    found = registered_reference(versions, case["type"], case["definition"])
    return None if found is None else str(found)


# -- envelopes


def _envelope_inputs() -> Iterator[Case]:
    good = {env.DUE: str(NEW_YEAR), env.TARGET: _ORDERS}

    def case(name: str, **changes: str | None) -> Case:
        properties: dict[str, str | None] = {**good}
        for key, value in changes.items():
            properties[env.PREFIX + key] = value
        kept = {key: value for key, value in properties.items() if value is not None}
        return {"name": name, "properties": kept}

    yield case("due time and target")
    yield {"name": "other properties", "properties": {**good, "color": "red", "Delaylevel.x": ""}}
    yield {"name": "no properties", "properties": {}}
    for value in (
        "0", "1", "007", "253402300799999", "253402300800000", "9223372036854775807",
        "99999999999999999999", "18446744073709551616", "", " 1", "1 ", "+1", "-1", "1.5", "1e3",
        "0x10", "1_000", "١٢٣", "soon",
    ):  # fmt: skip
        yield case(f"due {value!r}", due=value)
    yield case("no due time", due=None)
    yield case("no target", target=None)
    for value in (
        "orders", "acme/eu/invoices", "persistent://acme/eu/rück", "", "a/b", "http://a/b/c",
        "non-persistent://a/b/c", "persistent://a/b", "persistent://a/b/c/d",
    ):  # fmt: skip
        yield case(f"target {value!r}", target=value)
    position = "public/default/_orders-delay-level-partition-3:17:4:-1"
    for value in (position, "order-1", "Ä", "", " ", "x" * 512, "x" * 513):
        yield case(f"ID {value[:20]!r} of {len(value)}", id=value)
    for value in (
        "AVRO:0123456789abcdef", "STRING:e3b0c44298fc1c14", "KEY_VALUE:0123456789abcdef", "AVRO",
        "AVRO:", ":0123456789abcdef", "", ":", "AVRO:0123:4567", "DATE:e3b0c44298fc1c14",
        "INSTANT:e3b0c44298fc1c14", "avro:0123456789abcdef",
    ):  # fmt: skip
        yield case(f"schema {value!r}", schema=value)
    for value in ("0", "1", "4294967295", "-1", "", "one"):
        yield case(f"attempt {value!r}", attempt=value)
    for value in ("LZ4", "ZLib", "ZSTD", "SNAPPY", "ZLIB", "lz4", "NONE", ""):
        yield case(f"compression {value!r}", compression=value)
    yield case("unreadable", unreadable="the key is not UTF-8")
    for value in ("teleport", "message", "", "Cancel", "x" * 50):
        yield case(f"kind {value!r}", kind=value)
    yield case("a kind without a due time", kind="teleport", due=None)
    yield case("unreadable and of a kind", kind="teleport", unreadable="the key is not UTF-8")
    yield case("a cancellation", kind="cancel", id="order-1")
    yield case("a cancellation without the ID of its message", kind="cancel")
    yield case("a cancellation with an empty ID", kind="cancel", id="")
    yield case("a cancellation without a due time", kind="cancel", id="order-1", due=None)
    yield case("a cancellation that cannot be read", kind="cancel", id="a", unreadable="the key")
    for value in ("0", "1", str(NEW_YEAR + 1), "253402300799999", "253402300800000", "", "-1"):
        yield case(f"expires {value!r}", expires=value)
    for value in ("order-1", ""):
        yield case(f"replaces {value!r}", replaces=value)
    yield case("a reason does not matter", reason="its registry has no schema", attempt="2")
    yield case("an unknown property does not matter", colour="red")


def _envelope_answer(case: Case) -> Any:
    try:
        found = Envelope.read(case["properties"])
    except EnvelopeError as error:
        reason = error.reason
        fault = reason.split(" ")[0].removesuffix(":")
        if env.UNREADABLE in case["properties"]:
            fault = env.UNREADABLE
        return {"fault": fault, "reason": reason}
    return {
        "due": found.due_ms,
        "target": found.target,
        "id": found.id,
        "schema": None if found.schema is None else str(found.schema),
        "attempt": found.attempt,
        "compression": found.compression,
        "kind": found.kind,
        "expires": found.expires_ms or None,
        "replaces": found.replaces,
    }


# -- properties that a producer writes


def _property_inputs() -> Iterator[Case]:
    applications: dict[str, Mapping[str, str]] = {
        "none": {},
        "two": {"color": "red", "größe": "ü"},
        "a forwarded message": {
            "color": "red",
            "delaylevel.id": "old",
            "delaylevel.due": "1",
            "delaylevel.target": "x",
            "delaylevel.kind": "cancel",
            "delaylevel.anything": "",
            "delaylevel": "kept",
            "Delaylevel.id": "kept",
        },
    }
    for name, application in applications.items():
        for own in (None, "order-1"):
            for schema in (None, "AVRO:0123456789abcdef"):
                for compression in (None, "ZLib"):
                    yield {
                        "name": f"{name}, ID {own}, schema {schema}, compression {compression}",
                        "application": dict(application),
                        "due": NEW_YEAR,
                        "target": _ORDERS,
                        "id": own,
                        "schema": schema,
                        "compression": compression,
                    }


def _property_answer(case: Case) -> Any:
    schema = SchemaRef.parse(case["schema"]) if case["schema"] else None
    envelope = Envelope(
        case["due"], case["target"], case["id"], schema, compression=case["compression"]
    )
    application = env.application_properties(case["application"])
    return {
        "parked": envelope.parked_properties(application),
        "delivered": envelope.delivered_properties(application),
    }


# -- cancellations


def _cancellation_inputs() -> Iterator[Case]:
    def case(level_topic: str, after_ms: int, key: str | None, own: str) -> Case:
        return {
            "name": f"{level_topic}, {after_ms} ms, key {key!r}, ID {own[:60]!r}",
            "level_topic": level_topic,
            "target": _ORDERS,
            "now": ODD,
            "due": ODD + after_ms,
            "key": key,
            "id": own,
        }

    for name in (
        "days",
        "days and hours, Function, 64 window partitions",
        "hours, recirculating, 16 window partitions",
    ):
        for after_ms in (-_DAY_MS, 0, 1, _HOUR_MS - 1, _HOUR_MS, 5 * _DAY_MS, 40 * _DAY_MS):
            yield case(name, after_ms, None, "order-1")
        yield case(name, 1, "customer-7", "order-1")
        yield case(name, 1, "", "order-1")
        for topic in (DESCRIPTIONS[name].window_topic, DESCRIPTIONS[name].level_topic(0)):
            for partition in ("0", "3", "15", "63", "64", "03", "x", "-1", ""):
                own = f"{topic.full.removeprefix('persistent://')}-partition-{partition}:17:4:-1"
                yield case(name, 1, None, own)
        direct = DESCRIPTIONS[name].window_topic.partition(1).full.removeprefix("persistent://")
        yield case(name, 1, "customer-7", f"{direct}:17:4:0")
        for own in (
            f"{direct}:17:4:0", f"{direct}:17:4", f"x{direct}:17:4:0", f"{direct}:::",
            f"persistent://{direct}:17:4:-1",
        ):  # fmt: skip
            yield case(name, 1, None, own)
    yield case("days, broker", 1, None, "order-1")


def _cancellation_answer(case: Case) -> Any:
    description = DESCRIPTIONS[case["level_topic"]]
    if not description.cancellable:
        raise LevelTopicError("it does not allow cancellations")
    if description.is_position(case["id"]):
        raise InvalidInputError("it is a position, which is no ID")
    envelope = cancellation(case["due"], case["target"], case["id"])
    router = Router(description.levels)
    decision = router.decide(case["due"], case["now"])
    deliver_at = None
    if decision.hop is Hop.PARK:
        topic = description.level_topic(decision.level).partition(decision.partition)
        deliver_at = hop.parked_until_ms(
            description, router, decision.level, decision.partition, case["now"]
        )
    else:
        partition = description.window_partition(case["key"] or "", case["id"])
        topic = description.window_topic.partition(partition)
    return {
        "properties": envelope.parked_properties({}),
        "topic": topic.full,
        "deliver_at": deliver_at,
    }


def _receipt_inputs() -> Iterator[Case]:
    level = "persistent://public/default/_orders-delay-level"
    place = "public/default/_orders-delay-level-window-partition-3:17:4"
    receipts = {
        "an ID of the application": Receipt("order-1", NEW_YEAR, _ORDERS, level, "", place),
        "a key": Receipt("order-1", NEW_YEAR, _ORDERS, level, "Käse 日本 \U0001f600 \x7f\n", place),
        "a place as ID": Receipt(place, ODD, _ORDERS, level, "", place),
        "no place": Receipt("Ä/?=", 1, "persistent://acme/eu/rück", level),
        "sent directly": Receipt("a", 1, _ORDERS, level, "k", "public/default/orders:1:2"),
        "sent directly to a partition": Receipt(
            "a", 1, _ORDERS, level, "", "public/default/orders-partition-12:1:2"
        ),
        "stored without a position": Receipt(
            "a", 1, _ORDERS, level, "", "public/default/orders:-1:-1"
        ),
    }
    for name, receipt in receipts.items():
        yield {"name": name, "text": str(receipt)}
    good = str(receipts["a key"])
    yield {"name": "white space around it", "text": f" {good}\n"}

    def made(name: str, value: Any) -> Case:
        text = value if isinstance(value, str) else json.dumps(value)
        data = text.encode() + zlib.crc32(text.encode()).to_bytes(4, "big")
        encoded = base64.urlsafe_b64encode(data).rstrip(b"=").decode()
        return {"name": name, "text": "dl1." + encoded}

    whole = {"due": 1, "target": "orders", "topic": level, "id": "a"}
    yield made("short names, white space, and an unknown member", {**whole, "later": [1]})
    for name in whole:
        yield made(f"without {name}", {key: value for key, value in whole.items() if key != name})
    for name, value in (
        ("due", 0), ("due", -1), ("due", "1"), ("due", 1.5), ("due", True), ("due", 1 << 62),
        ("id", ""), ("id", 7), ("key", None), ("target", "a/b"), ("topic", "http://a"),
        ("at", "somewhere"), ("at", "t/n/x:1"), ("at", "t/n/x:a:b"), ("at", "a/b:1:2"),
    ):  # fmt: skip
        yield made(f"{name} {value!r}", {**whole, name: value})
    yield made("a list", [])
    yield made("not JSON", "{")
    for name, text in (
        ("empty", ""), ("another version", "dl2.abc"), ("no prefix", good[4:]), ("cut", good[:-1]),
        ("cut more", good[:-6]), ("nothing but the prefix", "dl1."), ("one character", "dl1.A"),
        ("other characters", good[:10] + "!" + good[11:]),
        ("changed", good[:10] + ("A" if good[10] != "A" else "B") + good[11:]),
    ):  # fmt: skip
        yield {"name": name, "text": text}


def _receipt_answer(case: Case) -> Any:
    found = Receipt.parse(case["text"])
    return {
        "id": found.id,
        "due": found.due_ms,
        "target": found.target,
        "level_topic": found.level_topic,
        "key": found.key,
        "place": found.stored_at,
        "written": str(found),
        "sent_directly": found.sent_directly,
    }


def _outcome_inputs() -> Iterator[Case]:
    for status in ("cancelled", "too late", "unknown"):
        outcome = Outcome(OutcomeStatus(status), "order-1", _ORDERS, NEW_YEAR, NEW_YEAR - 1)
        yield {"name": status, "properties": outcome.properties()}
    full = Outcome(
        OutcomeStatus.TOO_LATE, "Ä", _ORDERS, NEW_YEAR, NEW_YEAR + 2, NEW_YEAR + 1, "a reason", "ö"
    ).properties()
    yield {"name": "every property", "properties": full}
    yield {"name": "an unknown property", "properties": {**full, "delaylevel.later": "1"}}
    for name in full:
        rest = {key: value for key, value in full.items() if key != name}
        yield {"name": f"without {name}", "properties": rest}
    for name, value in (
        ("outcome", "accepted"), ("outcome", ""), ("outcome", "Cancelled"), ("id", ""),
        ("due", "soon"), ("decided", ""), ("decided", "-1"), ("released", "1.5"), ("target", "a/b"),
    ):  # fmt: skip
        changed = {**full, f"delaylevel.{name}": value}
        yield {"name": f"{name} {value!r}", "properties": changed}


def _outcome_answer(case: Case) -> Any:
    try:
        found = Outcome.read(case["properties"])
    except EnvelopeError:
        return {"refusal": "envelope"}
    return {
        "status": found.status.value,
        "id": found.id,
        "target": found.target,
        "key": found.key,
        "due": found.due_ms,
        "decided": found.decided_ms,
        "released": found.released_ms,
        "reason": found.reason,
    }


# -- sizes and settings


def _size_inputs() -> Iterator[Case]:
    for name in ("days", "year to minutes", "several targets", "other settings", "days, broker"):
        for schema in (None, "AVRO:0123456789abcdef"):
            for compression, limit in ((None, 5_242_880), ("LZ4", 5_242_880), (None, 65_536)):
                yield {
                    "name": f"{name}, schema {schema}, compression {compression}, {limit}",
                    "level_topic": name,
                    "target": DESCRIPTIONS[name].targets[-1],
                    "schema": schema,
                    "compression": compression,
                    "max_message_size": limit,
                }


def _size_answer(case: Case) -> Any:
    schema = SchemaRef.parse(case["schema"]) if case["schema"] else None
    return SizeLimit(
        DESCRIPTIONS[case["level_topic"]],
        case["target"],
        schema,
        case["max_message_size"],
        case["compression"],
    ).bytes


def _setting_inputs() -> Iterator[Case]:
    for name in ("days", "days, Function", "year to minutes", "own units", "shortest unit"):
        yield {"name": name, "level_topic": name, "options": {}}
    for timeout in (-1, 0, 1, 600_000, 600_001):
        options = {"send_timeout_ms": timeout}
        yield {"name": f"send timeout {timeout}", "level_topic": "days", "options": options}
    for most in (1, 1000, 1024, 1025, 5000):
        options = {"batching_max_messages": most}
        yield {"name": f"batches of {most}", "level_topic": "days", "options": options}
    for name in ("days", "days, Function"):
        options = {"batching_enabled": False}
        yield {"name": f"{name}, not batched", "level_topic": name, "options": options}


_PYTHON_NAMES = {"send_timeout_ms": "send_timeout_millis"}


def _setting_answer(case: Case) -> Any:
    options = {_PYTHON_NAMES.get(name, name): value for name, value in case["options"].items()}
    description = DESCRIPTIONS[case["level_topic"]]
    settings, warning = level_producer_settings(options, description)
    window = window_producer_settings(settings, options)
    return {
        "batched": settings["batching_enabled"],
        "batched_in_window": window["batching_enabled"],
        "batching_max_messages": settings["batching_max_messages"],
        "send_timeout_ms": settings["send_timeout_millis"],
        "warned": warning is not None,
    }


#: The function that computes the answer of a case, by section.
ANSWERS: dict[str, Callable[[Case], Any]] = {
    "names": _name_answer,
    "descriptions": _description_answer,
    "routes": _route_answer,
    "window_partitions": _window_answer,
    "schemas": _schema_answer,
    "registered": _registered_answer,
    "properties": _property_answer,
    "envelopes": _envelope_answer,
    "cancellations": _cancellation_answer,
    "receipts": _receipt_answer,
    "outcomes": _outcome_answer,
    "sizes": _size_answer,
    "settings": _setting_answer,
}

#: The function that yields the inputs of the cases, by section.
INPUTS: dict[str, Callable[[], Iterator[Case]]] = {
    "names": _name_inputs,
    "descriptions": _description_inputs,
    "routes": _route_inputs,
    "window_partitions": _window_inputs,
    "schemas": _schema_inputs,
    "registered": _registered_inputs,
    "properties": _property_inputs,
    "envelopes": _envelope_inputs,
    "cancellations": _cancellation_inputs,
    "receipts": _receipt_inputs,
    "outcomes": _outcome_inputs,
    "sizes": _size_inputs,
    "settings": _setting_inputs,
}


def answer(section: str, case: Case) -> Any:
    """Return the answer of the code to a case: a value, or the name of its refusal."""
    try:
        return ANSWERS[section](case)
    except DelayLevelError as error:
        for kind, name in _REFUSALS:
            if isinstance(error, kind):
                return {"refusal": name}
        raise


def text() -> str:
    """Return the whole file. Each case is one line, so that changes are easy to see."""
    parts = []
    for section, inputs in INPUTS.items():
        lines = []
        for case in inputs():
            full = {**case, "expect": answer(section, case)}
            lines.append("    " + json.dumps(full, ensure_ascii=True))
        parts.append(f'  "{section}": [\n' + ",\n".join(lines) + "\n  ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Write the file, or check it; return the exit code."""
    wanted = text()
    if "--check" in sys.argv[1:]:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{FILE} is not up to date: run python tools/make_vectors.py", file=sys.stderr)
        return 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
