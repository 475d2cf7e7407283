"""Tests of the rules: every planted fault in a story is reported, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torture.invariants import violations
from torture.ledger import (
    Cancelled,
    Confirmed,
    Ledger,
    LedgerReader,
    Received,
    Row,
    Sent,
    Stepped,
)
from torture.story import Pipeline, Story

ONCE = Pipeline("once", True, frozenset({"dispatcher-1", "producer-1"}))
LEAST = Pipeline("least", False, frozenset({"run-1"}))
PIPELINES = {"orders": ONCE, "bills": LEAST}
SUBSCRIPTIONS = ("exclusive", "shared")
DUE_MS = 1_000_000


def sent(name: str = "m", target: str = "orders") -> list[Row]:
    return [
        Sent(name, target, DUE_MS, DUE_MS - 5_000, "sum"),
        Confirmed(name, DUE_MS - 4_900, 1, ""),
    ]


def received(name: str = "m", **changes: object) -> list[Row]:
    """Return an arrival at each subscription."""
    fields: dict[str, object] = {
        "target": "orders",
        "place": "1:0",
        "published_ms": DUE_MS,
        "received_ms": DUE_MS + 3,
        "checksum": "sum",
        "message_id": name,
        **changes,
    }
    return [
        Received(name=name, subscription=subscription, **fields)  # type: ignore[arg-type]
        for subscription in SUBSCRIPTIONS
    ]


def cancelled(status: str, name: str = "m", **times: int) -> Row:
    return Cancelled(name, DUE_MS - 100, status, "topic", **times)


def rules_broken(*rows: Row) -> set[str]:
    story = Story(PIPELINES, frozenset(SUBSCRIPTIONS))
    story.add(rows)
    return {found.rule for found in violations(story)}


def test_a_run_without_a_fault_breaks_no_rule() -> None:
    assert rules_broken(*sent(), *received()) == set()


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        ("lost", sent()),
        ("lost", [*sent(), received()[0]]),
        ("lost", [*sent(), cancelled("unknown")]),
        ("early", [*sent(), *received(published_ms=DUE_MS - 1)]),
        ("early", [*sent(target="bills"), *received(target="bills", received_ms=DUE_MS - 1)]),
        ("changed", [*sent(), *received(checksum="other")]),
        ("changed", [*sent(), *received(target="bills")]),
        ("copied", [*sent(), *received(), *received(place="1:1")]),
        ("another id", [*sent(), *received(), *received(place="1:1", message_id="n")]),
        ("another id", [*sent(), *sent("n"), *received(), *received("n", message_id="m")]),
        ("false outcome", [*sent(), *received(), cancelled("cancelled")]),
        ("false outcome", [*sent(), *received(), cancelled("cancelled"), cancelled("too late")]),
        ("false outcome", [*sent(), cancelled("too late")]),
        ("false outcome", [*sent(), cancelled("unknown")]),
        ("false outcome", [*sent(), *received(), cancelled("accepted")]),
        (
            "false outcome",
            [*sent(), *received(), cancelled("too late", released_ms=9, decided_ms=8)],
        ),
        ("never sent", received()),
    ],
)
def test_a_planted_fault_is_reported(rule: str, rows: list[Row]) -> None:
    assert rule in rules_broken(*rows)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([*sent(), cancelled("cancelled"), cancelled("accepted")], id="cancelled"),
        pytest.param([*sent(), *received(), cancelled("too late")], id="too late"),
        pytest.param([*sent(), *received(), cancelled("unknown")], id="unknown"),
        pytest.param([*sent(), *received(), cancelled("requested")], id="killed while it asked"),
        pytest.param([sent()[0]], id="not confirmed, not received"),
        pytest.param([sent()[0], *received()], id="not confirmed, received"),
        pytest.param([*sent(), *received(), *received()], id="delivered again"),
        pytest.param(
            [
                *sent(target="bills"),
                *received(target="bills"),
                *received(target="bills", place="1:1"),
            ],
            id="copies at least once",
        ),
    ],
)
def test_what_is_allowed_is_not_reported(rows: list[Row]) -> None:
    assert rules_broken(*rows) == set()


def stepped(part: str, offset_ms: int, until_ms: int) -> Row:
    return Stepped(part, offset_ms, DUE_MS - 10_000, until_ms)


@pytest.mark.parametrize(
    ("step", "early_ms", "allowed"),
    [
        (stepped("dispatcher-1", 500, DUE_MS), 500, True),
        (stepped("dispatcher-1", 500, DUE_MS), 501, False),
        (stepped("dispatcher-1", -500, DUE_MS), 1, False),
        (stepped("run-1", 500, DUE_MS), 500, False),
        (stepped("dispatcher-1", 500, DUE_MS - 2_600), 500, False),
    ],
    ids=["as much", "more", "behind", "another process", "long ago"],
)
def test_only_a_clock_that_is_ahead_excuses_early_messages(
    step: Row, early_ms: int, allowed: bool
) -> None:
    rows = [*sent(), *received(published_ms=DUE_MS - early_ms), step]
    assert rules_broken(*rows) == (set() if allowed else {"early"})


@pytest.mark.parametrize(
    ("step", "before_ms", "allowed"),
    [
        (stepped("dispatcher-1", -500, DUE_MS), 500, True),
        (stepped("dispatcher-1", 500, DUE_MS), 500, True),
        (stepped("dispatcher-1", -500, DUE_MS), 501, False),
        (stepped("run-1", -500, DUE_MS), 500, False),
        (stepped("dispatcher-1", -500, DUE_MS - 2_600), 500, False),
    ],
    ids=["behind", "ahead", "more", "another process", "long ago"],
)
def test_only_a_wrong_clock_excuses_a_release_after_the_decision(
    step: Row, before_ms: int, allowed: bool
) -> None:
    times = {"released_ms": DUE_MS, "decided_ms": DUE_MS - before_ms}
    rows = [*sent(), *received(), cancelled("too late", **times), step]
    assert rules_broken(*rows) == (set() if allowed else {"false outcome"})


def test_the_ledgers_of_several_processes_make_one_story(
    tmp_path: Path,
) -> None:
    reader = LedgerReader(tmp_path)
    assert reader.new_rows() == []
    writers: list[Callable[[list[Row]], None]] = [
        Ledger(tmp_path, name).write for name in ("producer-1", "consumer-shared")
    ]
    writers[0](sent())
    assert reader.new_rows() == sent()
    writers[1](received())
    writers[0]([cancelled("too late")])
    assert sorted(map(str, reader.new_rows())) == sorted(
        map(str, [*received(), cancelled("too late")])
    )
    assert reader.new_rows() == []


def test_a_message_that_expires_soon_may_be_dropped_for_all_subscriptions_alike() -> None:
    soon = sent()
    soon[0] = soon[0]._replace(expires_ms=DUE_MS + 2_000)
    assert rules_broken(*soon) == set()
    assert rules_broken(*soon, received()[0]) == {"lost"}
    assert rules_broken(*soon, cancelled("unknown")) == set()
    late = received(published_ms=DUE_MS + 60_000)
    assert rules_broken(*soon, *late) == {"expired"}


def test_a_message_that_expires_in_an_hour_is_not_dropped() -> None:
    later = sent()
    later[0] = later[0]._replace(expires_ms=DUE_MS + 3_600_000)
    assert rules_broken(*later) == {"lost"}
