"""Tests of the checks that benchmarks make on arriving messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("psutil")

DUE_MS = 1_800_000_000_000
AT_DUE = DUE_MS / 1000


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import arrivals

    return arrivals


def _stamps(arrivals: Any, *messages: tuple[int, int]) -> list[bytes]:
    """Return the stamps of messages: (number, due time after `DUE_MS` in ms)."""
    return [arrivals.stamped(number, DUE_MS + due)[: arrivals.STAMP] for number, due in messages]


def test_a_payload_has_one_kib_and_its_stamp(arrivals: Any) -> None:
    body = arrivals.stamped(7, DUE_MS)
    assert len(body) == 1024
    assert body[: arrivals.STAMP] == b"000000000007" + b"1800000000000"


def test_losses_copies_and_early_messages_are_counted(arrivals: Any) -> None:
    stamps = _stamps(arrivals, (0, 0), (1, 5), (0, 0), (3, 0))
    row = arrivals.summary(stamps, [AT_DUE + 0.002] * 4, count=5, keys=0)
    assert (row["lost"], row["twice"], row["early"]) == (2, 1, 1)
    assert (row["least_ms"], row["p50_ms"], row["max_ms"]) == (-3.0, 2.0, 2.0)


def test_nothing_at_all_is_a_loss_of_everything(arrivals: Any) -> None:
    row = arrivals.summary([], [], count=5, keys=0)
    assert (row["lost"], row["twice"], row["max_ms"]) == (5, 0, 0.0)


def test_order_is_by_due_time_and_then_by_number(arrivals: Any) -> None:
    def disorder(*messages: tuple[int, int], keys: int = 0) -> int:
        stamps = _stamps(arrivals, *messages)
        times = [AT_DUE + 1] * len(stamps)
        return int(arrivals.summary(stamps, times, len(stamps), keys)["disorder"])

    assert disorder((0, 0), (1, 0), (2, 0)) == 0
    assert disorder((0, 0), (2, 0), (1, 0)) == 1
    assert disorder((2, 0), (0, 5), (1, 5)) == 0
    assert disorder((0, 5), (1, 0)) == 1
    assert disorder((1, 0), (0, 0), keys=2) == 0  # different keys
    assert disorder((3, 0), (0, 0), (1, 0), keys=2) == 1
    assert disorder((1000, 0), (0, 0)) == 0  # different window partitions


def test_nats_is_left_out_if_it_is_not_installed(
    arrivals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nats_peer

    monkeypatch.setattr(nats_peer, "server_path", lambda: None)
    with nats_peer.private_nats() as server:
        assert server is None
    assert "'.[bench]'" in nats_peer.MISSING


def test_due_times_of_nats_are_exact_to_the_millisecond(arrivals: Any) -> None:
    import nats_peer

    assert nats_peer.rfc3339(DUE_MS + 7) == "2027-01-15T08:00:00.007Z"
