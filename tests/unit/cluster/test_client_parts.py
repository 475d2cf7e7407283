"""Tests of the client's private parts: where they are used, and the search for them."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _pulsar
import pulsar
import pytest
from without_parts import without

from delaylevel.cluster.client_parts import checks, parts, receiving, sending
from delaylevel.cluster.client_parts.parts import ClientPart
from delaylevel.errors import PrerequisiteError

ROOT = Path(__file__).parents[3]
PLACE = ROOT / "delaylevel" / "cluster" / "client_parts"
#: The in-memory Pulsar stands for the private parts themselves.
IN_MEMORY = ROOT / "delaylevel" / "testing"
#: Attributes of the client's objects.
PRIVATE = {
    *("_client", "_producer", "_consumer", "_reader", "_message", "_schema", "_schema_info"),
    *("_build_msg", "_wrap", "_result", "_msg_id"),
}


def uses(source: str) -> Iterator[str]:
    """Yield each use of a private part of the client, as an attribute, a name or a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "_pulsar")
        elif isinstance(node, ast.ImportFrom) and node.module == "_pulsar":
            yield "_pulsar"
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            # Classes of ours may have attributes of these names.
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield f"line {node.lineno}: {node.attr}"
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.keyword) and node.arg in PRIVATE:
            yield f"line {node.value.lineno}: {node.arg}="


def test_private_parts_are_used_in_one_place() -> None:
    found = {}
    for folder in ("delaylevel", "functions", "spark_sync", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(PLACE) or path.is_relative_to(IN_MEMORY):
                continue
            if here := list(uses(path.read_text("utf-8"))):
                found[str(path.relative_to(ROOT))] = here
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import _pulsar",
        "from _pulsar import Result",
        "core = producer._producer",
        "core = getattr(client, '_client', None)",
        "call(SimpleNamespace(_schema=schema))",
    ],
)
def test_the_search_for_uses_finds_them(source: str) -> None:
    assert list(uses(source))


def test_the_installed_client_has_every_part() -> None:
    assert parts.missing() == []


@pytest.mark.parametrize(
    ("owner", "name", "lost"),
    [
        (_pulsar, "MessageBuilder", {ClientPart.PRODUCER}),
        (_pulsar, "SchemaInfo", {ClientPart.SCHEMA_INFO, ClientPart.IN_MEMORY}),
        (
            *(pulsar.Producer, "_build_msg"),
            {ClientPart.CHECKS, ClientPart.SCHEMA, ClientPart.IN_MEMORY},
        ),
    ],
)
def test_a_part_that_is_removed_is_missed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, lost: set[ClientPart]
) -> None:
    monkeypatch.delattr(owner, name)
    assert set(ClientPart) - parts.look() == lost


def test_another_layout_of_the_client_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(self: Any) -> None:
        self.core.flush()

    monkeypatch.setattr(pulsar.Producer, "flush", flush)
    assert ClientPart.PRODUCER not in parts.look()
    assert ClientPart.OPENING not in parts.look()
    monkeypatch.setattr(pulsar.Reader, "read_next", lambda self, timeout_millis=None: None)
    assert ClientPart.READER not in parts.look()


def test_a_missing_part_is_logged_at_the_import() -> None:
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            "import logging, _pulsar; del _pulsar.MessageBuilder; logging.basicConfig()\n"
            "from delaylevel.cluster.client_parts import parts",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"pulsar-client {parts.version()} lacks a part" in answer.stderr
    assert "(PRODUCER); it uses Producer.send_async()" in answer.stderr


@pytest.mark.parametrize("part", ClientPart)
def test_the_error_names_the_part_and_the_version(
    monkeypatch: pytest.MonkeyPatch, part: ClientPart
) -> None:
    parts.require(part)
    without(monkeypatch, part)
    with pytest.raises(PrerequisiteError, match=rf"{parts.version()} lacks.*\({part.name}\)"):
        parts.require(part)


def test_without_the_core_of_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = pulsar.Producer()
    producer._producer = core = object()
    assert sending.producer_core(producer) is core
    assert sending.producer_core(SimpleNamespace(_producer=core)) is None
    without(monkeypatch, ClientPart.PRODUCER)
    assert sending.producer_core(producer) is None
    assert sending.calls_back_later(producer)


def test_without_the_schema_the_application_states_it(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(_schema="own")
    assert sending.schema_of(owner, "stated") == "own"
    without(monkeypatch, ClientPart.SCHEMA)
    assert sending.schema_of(owner, "stated") == "stated"
    with pytest.raises(PrerequisiteError, match=r"lacks.*name its schema with schema=…"):
        sending.schema_of(owner)


@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": {"a": 1}},
        {"properties": []},
        {"keys": (b"key", None)},
        {"keys": (None, 5)},
        {"not_parkable": ("1", None, False)},
        {"event_timestamp": "now"},
        {"deliver_at": 1.5},
        {"content": "text"},
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_arguments_are_checked_without_the_client_too(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], there: bool
) -> None:
    if not there:
        without(monkeypatch, ClientPart.CHECKS)
    right: dict[str, Any] = {
        "schema": SimpleNamespace(encode=lambda content: content),
        "content": b"body",
        "properties": {"a": "1"},
        "keys": ("key", None),
        "not_parkable": (7, None, False),
        "event_timestamp": 5,
    }
    checks.check_message(**right)
    with pytest.raises((TypeError, ValueError)):
        checks.check_message(**{**right, **wrong})


class _Public:
    def __init__(self, version: Any) -> None:
        self._version = version

    def data(self) -> bytes:
        return b"four"

    def schema_version(self) -> Any:
        return self._version


@pytest.mark.parametrize(
    ("stored", "version"), [("", -1), (b"", -1), (None, -1), ("\0" * 7 + "\3", 3), (b"\0" * 8, 0)]
)
def test_a_message_without_its_core(
    monkeypatch: pytest.MonkeyPatch, stored: Any, version: int
) -> None:
    without(monkeypatch, ClientPart.MESSAGE)
    message = receiving.message_core(_Public(stored))
    assert receiving.message_core(message) is message
    assert (message.data(), message.length()) == (b"four", 4)
    assert message.int_schema_version() == version


def test_null_values_that_cannot_be_told_from_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, ClientPart.MESSAGE, ClientPart.NULL_VALUES)
    with pytest.raises(PrerequisiteError, match=r"null values from empty ones \(NULL_VALUES\)"):
        receiving.message_core(_Public("")).has_null_value()


def test_the_search_is_quiet_with_the_installed_client(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parts.look()
    assert not caplog.records
