"""The answers of the code to the questions of spec/vectors.json, by section."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from delaylevel.cluster.port import SchemaVersion
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.schemas import registered_reference
from delaylevel.errors import DelayLevelError, EnvelopeError, LevelTopicError
from delaylevel.model import envelope as env
from delaylevel.model.due_time import expires_at_ms, reason_if_expired
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import (
    LevelTopicDescription,
    default_level_topics,
)
from delaylevel.model.outcome import Outcome, Receipt
from delaylevel.model.topic_name import TopicName
from delaylevel.producer import setup
from delaylevel.producer.checks import Message, SizeLimit
from delaylevel.producer.level_topic_cache import LevelTopicCache
from delaylevel.producer.routing import WINDOW, Routing
from delaylevel.testing import ManualClock
from delaylevel.topics import registry
from support.scripted_http import Answer, Server, reply, scripted

Case = dict[str, Any]

VECTORS: dict[str, list[Case]] = json.loads(
    (Path(__file__).parents[2] / "spec" / "vectors.json").read_text("utf-8")
)


# The names of docs/wire.md for errors; each is that of a class.
_REFUSALS = (
    *("delay-too-long", "invalid-delay", "unsupported-option", "message-too-large"),
    *("target-not-allowed", "upgrade-required", "level-topic", "invalid-input", "broker"),
)


def _described(description: LevelTopicDescription) -> dict[str, Any]:
    """Return the meaning of a description, for comparison by other languages."""
    return {
        "overflow": description.levels.overflow,
        "mover": description.mover.value,
        "final_window": description.final_window.value,
        "targets": list(description.targets),
        "window_partitions": description.window_partitions,
        "window_topic": description.window_topic.full if description.cancellable else None,
        "maximum_ms": description.levels.maximum_ms,
        "smallest_lead_ms": description.levels.smallest_lead_ms,
        "reserve": description.reserve,
        "levels": [
            {
                "topic": description.level_topic(level.index).full,
                "partitions": level.partitions,
                "unit_ms": level.unit_ms,
                "lead_ms": level.lead_ms,
            }
            for level in description.levels
        ],
    }


def _description_answer(case: Case) -> Any:
    found = LevelTopicDescription.from_properties(case["topic"], case["properties"])
    return None if found is None else _described(found)


def _search_answer(case: Case) -> Any:
    """Find the level topic of a business topic by the properties of those of default names."""
    target = TopicName.parse(case["topic"]).full
    paths = {TopicName.parse(name).rest_path: found for name, found in case["answers"].items()}

    def give(_: str, path: str) -> Answer:
        found = paths.get(path.removeprefix("/admin/v2/").removesuffix(PARTITIONS))
        return reply(404, {}) if found is None else reply(200, {"properties": found, **_FOUR})

    with contextlib.closing(Server()) as server, contextlib.closing(Admin(server.url)) as admin:
        server.answer = give
        name = registry.default_name(admin, target, case["level_namespace"])
        found = registry.find(admin, name)
    if found is None:
        raise LevelTopicError("it does not exist, or is not finished")
    found.check_target(target)
    return found.topic


def _admin_answer(case: Case) -> Any:
    """Read a description through the admin interface, whose answers the case has."""
    with scripted(case["answers"]) as server, contextlib.closing(Admin(server.url)) as admin:
        found = registry.find(admin, case["topic"])
        requests = [path for _, path, *_ in server.seen][: len(case["answers"])]
    if found is None:
        raise LevelTopicError("it does not exist, or is not finished")
    return {"maximum_ms": found.levels.maximum_ms, "requests": requests}


def _replacement_answer(case: Case) -> Any:
    """Read a description again, and tell which one is used from then on."""
    known = _described_as(case["known"])
    times = itertools.count(0.0, 61.0)
    (found,) = (each for each in VECTORS["descriptions"] if each["name"] == case["found"])

    def describe() -> LevelTopicDescription | None:
        return LevelTopicDescription.from_properties(known.topic, found["properties"])

    def route_by(level_topic: LevelTopicDescription) -> Routing:
        return Routing(level_topic, known.targets[0], None, ManualClock(0))

    cache = LevelTopicCache(route_by, known, describe, now_s=lambda: next(times))
    return "found" if cache.refresh() else "known"


def _expiry_answer(case: Case) -> Any:
    description = _described_as("days and hours")
    routing = Routing(description, description.targets[0], None, ManualClock(case["now"]))
    route = routing.route(
        Message(deliver_at=case["due"], message_id="order-1", expires_at=case["expires"])
    )
    return (route.properties or {}).get(env.EXPIRES)


def _release_answer(case: Case) -> Any:
    description = replace(_described_as("days"), expire_after_ms=case["expire_after_ms"])
    properties = {env.DUE: str(case["due"]), env.TARGET: "orders"}
    if case["expires"] is not None:
        properties[env.EXPIRES] = str(case["expires"])
    read = Envelope.read(properties)
    if reason_if_expired(description, read.due_ms, read.expires_ms, case["now"]) is None:
        return None
    return expires_at_ms(description, read.due_ms, read.expires_ms)


def _name_answer(case: Case) -> Any:
    names = default_level_topics(case["topic"], case["level_namespace"])
    return {"target": TopicName.parse(case["topic"]).full, "level_topics": list(names)}


def _route_answer(case: Case) -> Any:
    description = _described_as(case["level_topic"])
    description.check_target(case["target"])
    routing = Routing(description, case["target"], None, ManualClock(case["now"]))
    route = routing.route(
        Message(deliver_at=case["due"], message_id=case["id"], partition_key=case["key"])
    )
    topic, partition = case["target"], None
    if route.parked:
        topic = TopicName.parse(routing.topic_of(route)).without_partition.full
        any_window = route.level == WINDOW and not (case["key"] or case["id"])
        partition = "any" if any_window else route.partition
    return {"topic": topic, "partition": partition, "deliver_at": route.deliver_at_ms}


def _window_answer(case: Case) -> Any:
    if not case["key"] and not case["id"]:
        return "any"
    description = replace(_described_as("days"), window_partitions=case["partitions"])
    return description.window_partition(case["key"], case["id"])


def _schema_answer(case: Case) -> Any:
    return str(SchemaRef.of(case["type"], case["definition"]))


def _registered_answer(case: Case) -> Any:
    versions = [
        SchemaVersion(each["type"], each["definition"], number)
        for number, each in enumerate(case["versions"])
    ]
    found = registered_reference(versions, case["type"], case["definition"])
    return None if found is None else str(found)


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


def _cancellation_answer(case: Case) -> Any:
    description = _described_as(case["level_topic"])
    if not description.cancellable:
        raise LevelTopicError("it does not allow cancellations")
    named = case["id"], case["due"], case["target"], description.topic, case["key"] or ""
    routing = Routing(description, case["target"], None, ManualClock(case["now"]))
    route = routing.route_cancellation(Receipt(*named))
    return {
        "properties": route.properties,
        "topic": routing.topic_of(route),
        "deliver_at": route.deliver_at_ms,
    }


def _receipt_answer(case: Case) -> Any:
    found = Receipt.parse(case["text"])
    assert Receipt.parse(str(found)) == found
    return {
        "id": found.id,
        "due": found.due_ms,
        "target": found.target,
        "level_topic": found.level_topic,
        "key": found.key,
        "place": found.stored_at,
        "sent_directly": found.sent_directly,
    }


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


def _size_answer(case: Case) -> Any:
    return SizeLimit(_described_as(case["level_topic"]), case["max_message_size"]).bytes


PARTITIONS = "/partitions?checkAllowAutoCreation=false"
_FOUR = {"partitions": 4}
_PYTHON_NAMES = {"send_timeout_ms": "send_timeout_millis"}


def _setting_answer(case: Case) -> Any:
    options = {_PYTHON_NAMES.get(name, name): value for name, value in case["options"].items()}
    description = _described_as(case["level_topic"])
    with patch.object(setup.log, "warning") as warning:
        settings, window = setup.producer_settings(options, description)
    return {
        "batched": settings["batching_enabled"],
        "batched_in_window": window["batching_enabled"],
        "batching_max_messages": settings["batching_max_messages"],
        "send_timeout_ms": settings["send_timeout_millis"],
        "warned": warning.called,
    }


def _described_as(name: str) -> LevelTopicDescription:
    """Return the level topic of a case among the descriptions."""
    (case,) = (each for each in VECTORS["descriptions"] if each["name"] == name)
    found = LevelTopicDescription.from_properties(case["topic"], case["properties"])
    assert found is not None
    return found


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
    "searches": _search_answer,
    "answers": _admin_answer,
    "replacements": _replacement_answer,
    "expiries": _expiry_answer,
    "releases": _release_answer,
    "sizes": _size_answer,
    "settings": _setting_answer,
}


def answer(section: str, case: Case) -> Any:
    """Return the answer of the code to a case: a value, or the name of its refusal."""
    try:
        return ANSWERS[section](case)
    except DelayLevelError as error:
        for kind in type(error).__mro__:
            name = re.sub(r"\B([A-Z])", r"-\1", kind.__name__.removesuffix("Error")).lower()
            if name in _REFUSALS:
                return {"refusal": name.replace("broker", "admin")}
        raise
