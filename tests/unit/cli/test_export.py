"""Tests of ``delaylevel pending export``: the three formats, and the file after an error."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

pytest.importorskip("duckdb")

import pyarrow.parquet as pq

from delaylevel import PartitionStrategy
from delaylevel.errors import BrokerError
from delaylevel.inspection import Inspector
from delaylevel.inspection.rows import SCHEMA
from delaylevel.testing import MemoryPulsar
from support.pending_commands import pending_commands

LEVELS = [PartitionStrategy(maximum_delay=timedelta(days=10))]
BODIES = {f"customer-{n}": bytes([n, 0xFF, 0x0A]) for n in range(5)}

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Return ``run("list", "orders", …)``: ``delaylevel pending`` on five messages in memory."""
    with MemoryPulsar() as memory:
        client = memory.client()
        client.subscribe("orders", "app")
        with client.create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=LEVELS
        ) as producer:
            # The last message is due first.
            for number, (key, body) in enumerate(BODIES.items()):
                producer.send(
                    body,
                    deliver_after=timedelta(days=9 - number),
                    partition_key=key,
                    properties={"note": 'a "b",\nc', "number": str(number)},
                )

        yield pending_commands(monkeypatch, memory)


def listed(run: Run, *options: str) -> list[dict[str, Any]]:
    """Return the rows that ``pending list`` shows."""
    shown = run("list", "orders", "--limit", "0", "-o", "jsonl", *options)
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_csv_has_the_keys_of_the_list_as_columns(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    assert run("export", "orders", str(file)).exit_code == 0
    with file.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    wanted = listed(run)
    assert [list(row) for row in rows] == [list(row) for row in wanted]
    assert [row["due_ms"] for row in rows] == [str(row["due_ms"]) for row in wanted]
    assert [json.loads(row["properties"]) for row in rows] == [row["properties"] for row in wanted]
    assert rows[0]["event_ms"] == ""


@pytest.mark.parametrize("payload", [False, True])
def test_parquet_has_the_columns_that_conditions_use(
    run: Run, tmp_path: Path, payload: bool
) -> None:
    file = tmp_path / "orders.PARQUET"
    options = ["--payload"] if payload else []
    assert run("export", "orders", str(file), *options).exit_code == 0
    table = pq.read_table(file)
    assert table.schema.names == [name for name in SCHEMA.names if payload or name != "value"]
    assert table.column("due_ms").to_pylist() == [row["due_ms"] for row in listed(run)]
    properties = dict(table.column("properties").to_pylist()[0])
    assert properties["note"] == 'a "b",\nc'
    if payload:
        assert table.column("value").to_pylist() == list(BODIES.values())[::-1]


def test_an_existing_file_is_replaced_only_with_force(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_text("precious")
    refused = run("export", "orders", str(file))
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert file.read_text() == "precious"
    assert run("export", "orders", str(file), "--force").exit_code == 0
    assert len(file.read_text().splitlines()) == 5
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_created_during_the_export_is_not_replaced(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "orders.jsonl"
    read = Inspector.ordered_batches

    def slowly(self: Inspector, *arguments: Any, **options: Any) -> Any:
        file.write_text("precious")
        return read(self, *arguments, **options)

    monkeypatch.setattr(Inspector, "ordered_batches", slowly)
    assert run("export", "orders", str(file)).exit_code == 2
    assert file.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_or_read_only_folder_is_reported(run: Run, tmp_path: Path) -> None:
    missing = run("export", "orders", str(tmp_path / "no" / "orders.csv"))
    assert missing.exit_code == 2
    assert "create it first" in missing.stderr
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run("export", "orders", str(blocked / "orders.csv")).exit_code == 2


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("force", [False, True])
def test_an_error_leaves_no_partial_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, force: bool
) -> None:
    file = tmp_path / f"orders.{ending}"
    before = []
    if force:
        file.write_text("the last export")
        before = [file]
    read = Inspector.ordered_batches

    def broken(self: Inspector, *arguments: Any, **options: Any) -> Any:
        yield from read(self, *arguments, **options)
        assert len(list(tmp_path.iterdir())) == len(before) + 1, "there is no temporary file"
        raise BrokerError("the broker went away")

    monkeypatch.setattr(Inspector, "ordered_batches", broken)
    failed = run("export", "orders", str(file), *(["--force"] if force else []))
    assert failed.exit_code == 1
    assert "went away" in failed.stderr
    assert list(tmp_path.iterdir()) == before
    if force:
        assert file.read_text() == "the last export"
