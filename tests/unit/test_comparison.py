"""Tests of the comparison with other systems: its arithmetic, its results and its page."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("psutil")

ROOT = Path(__file__).parents[2]
DUE_MS = 1_800_000_000_000


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that returns a module of the comparison."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: import_module(f"compare.{name}")


@pytest.fixture
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks/compare/results.json").read_text(encoding="utf-8")
    )
    return found


def _rows(*arrivals: tuple[int, int, float]) -> Any:
    """Return arrivals: (number, due time after `DUE_MS` in ms, lateness in ms)."""
    return np.array(
        [(n, DUE_MS + due, round((DUE_MS + due + late) * 1000)) for n, due, late in arrivals],
        dtype=np.int64,
    ).reshape(-1, 3)


def test_losses_copies_and_early_arrivals_are_counted(part: Any) -> None:
    rows = _rows((0, 0, 5), (1, 10, -800), (0, 0, 90), (2, 0, 7))
    found = part("measurement").measured(rows, np.array([0, 1, 2, 3]))
    assert (found["missing"], found["twice"]) == (1, 1)
    assert (found["early"], found["early_ms"]) == (1, 800.0)
    assert found["p50_ms"] == 5.0
    # One of four did not arrive, so nobody knows when the last one will.
    assert found["max_ms"] is None
    assert found["curve_ms"][0] == -800.0


def test_an_arrival_that_nobody_confirmed_is_no_fault(part: Any) -> None:
    found = part("measurement").measured(_rows((0, 0, 1), (1, 0, 2)), np.array([0]))
    assert (found["missing"], found["twice"], found["max_ms"]) == (0, 0, 1.0)


def test_without_arrivals_everything_is_missing(part: Any) -> None:
    found = part("measurement").measured(_rows(), np.arange(3))
    assert (found["missing"], found["p50_ms"], found["early"]) == (3, None, 0)


def test_a_restart_ends_when_the_last_overdue_message_has_arrived(part: Any) -> None:
    served_s = part("measurement").served_s
    rows = _rows((0, 0, 2000), (5, 0, 3500), (0, 0, 9000), (7, 0, 8000))
    began_us = DUE_MS * 1000
    assert served_s(rows, np.array([0, 5]), began_us) == 3.5
    assert served_s(rows, np.array([0, 6]), began_us) is None


def test_arrivals_are_read_up_to_the_last_whole_row(part: Any, tmp_path: Path) -> None:
    arrivals = part("measurement").arrivals
    assert arrivals(tmp_path / "none").shape == (0, 3)
    path = tmp_path / "out"
    path.write_bytes(_rows((0, 0, 1), (1, 0, 1)).astype("<i8").tobytes() + b"part")
    assert arrivals(path)[:, 0].tolist() == [0, 1]


def test_loads_are_the_same_for_each_system(part: Any) -> None:
    for load in part("loads").LOADS.values():
        dues = load.dues_ms(DUE_MS)
        assert (dues == load.dues_ms(DUE_MS)).all()
        assert len(dues) == load.count
        assert dues.min() >= DUE_MS
        smaller = load.of(1000)
        assert len(smaller.dues_ms(DUE_MS)) == 1000
        assert len(set(smaller.to_cancel.tolist())) == smaller.cancelled


def test_messages_that_are_due_during_a_restart_are_spread_over_all(part: Any) -> None:
    load = part("loads").LOADS["month"]
    dues = load.dues_ms(DUE_MS)
    overdue = np.flatnonzero(dues == DUE_MS)
    assert overdue.tolist() == load.probes.tolist()
    assert (overdue[0], overdue[-1]) == (0, load.count - 1)
    others = np.delete(dues, overdue)
    assert others.min() >= DUE_MS + 3_600_000
    assert others.max() < DUE_MS + 30 * 86_400_000


def test_a_consumer_writes_what_the_measurement_reads(part: Any, tmp_path: Path) -> None:
    path = tmp_path / "out"
    writer = part("client").Arrivals(str(path))
    writer.add(b"000000000007" + b"1800000000123")
    writer.write()
    (row,) = part("measurement").arrivals(path).tolist()
    assert row[:2] == [7, DUE_MS + 123]
    assert row[2] > 1_700_000_000_000_000


def test_a_client_is_watched_by_its_lines(part: Any, tmp_path: Path) -> None:
    program = (
        "import sys; print('ready'); print('progress 5');"
        "print('result {\"n\": %d}' % len(sys.argv))"
    )
    client = part("client").Client([sys.executable, "-c", program], {"a": 1}, tmp_path / "log")
    client.wait_ready()
    client.wait_progress(5, 10)
    assert client.result(10) == {"n": 2}
    client.stop()


def test_the_end_of_a_client_without_a_result_is_an_error(part: Any, tmp_path: Path) -> None:
    program = "import sys; sys.exit('no such stream')"
    client = part("client").Client([sys.executable, "-c", program], {}, tmp_path / "log")
    with pytest.raises(RuntimeError, match="no such stream"):
        client.result(10)
    client.stop()


def test_new_rows_replace_those_of_the_same_system_and_load(part: Any, tmp_path: Path) -> None:
    report = part("report")
    path = tmp_path / "sub" / "results.json"
    empty = report.load(path)
    one = {"system": "a", "load": "minute", "n": 1}
    other = {"system": "b", "load": "minute", "n": 2}
    found = report.add(empty, {"name": "a", "title": "A"}, [one])
    found = report.add(found, {"name": "b", "title": "B"}, [other])
    found = report.add(found, {"name": "a", "title": "A2"}, [{**one, "n": 3}])
    report.save(found, path)
    again = report.load(path)
    assert again == found
    assert sorted((row["system"], row["n"]) for row in again["rows"]) == [("a", 3), ("b", 2)]
    assert again["systems"] == {"a": {"title": "A2"}, "b": {"title": "B"}}


def test_the_page_shows_the_results(part: Any, results: dict[str, Any]) -> None:
    text = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    assert part("page").renewed(text, results) == text, (
        "not current: run `make compare COMPARE='--loads none --publish'`"
    )
    shown = set(re.findall(r"<!-- results: (\w+) -->", text))
    assert shown == set(part("page").TABLES)


def test_the_pictures_show_the_results(part: Any, results: dict[str, Any]) -> None:
    text = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    for name in part("plots").PICTURES:
        picture = (ROOT / "docs/images" / name).read_text(encoding="utf-8")
        assert f"results {part('plots').digest(results)}" in picture
        assert f"images/{name})" in text


def test_each_row_is_of_a_known_system_and_load(part: Any, results: dict[str, Any]) -> None:
    systems = import_module("compare.__main__").systems()
    known = {
        (name, load.name)
        for name, system in systems.items()
        for load in part("loads").LOADS.values()
        if system.cancels or not load.cancelled
    }
    found = [(row["system"], row["load"]) for row in results["rows"]]
    assert set(found) <= known
    assert len(set(found)) == len(found)
    assert set(part("page").ORDER) == set(systems)


def test_the_protocol_of_nats_is_read_in_any_pieces(part: Any) -> None:
    nats_client = part("nats_client")
    stream = (
        b'INFO {"a": 1}\r\nPING\r\n'
        b"MSG a.1 1 3\r\nabc\r\n"
        b"HMSG a.2 2 reply.x 12 17\r\nNATS/1.0\r\n\r\nhello\r\n"
        b"MSG a.3 1 back 0\r\n\r\n"
    )
    for size in (1, 7, len(stream)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            connection = nats_client.Connection.__new__(nats_client.Connection)
            connection._socket, connection._buffer = ours, bytearray()
            found = []
            for place in range(0, len(stream), size):
                theirs.sendall(stream[place : place + size])
                found += list(connection.read())
            assert theirs.recv(100) == b"PONG\r\n"
        assert found == [
            (b"a.1", b"", b"abc"),
            (b"a.2", b"reply.x", b"NATS/1.0\r\n\r\nhello"),
            (b"a.3", b"back", b""),
        ]
