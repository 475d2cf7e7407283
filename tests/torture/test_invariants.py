"""Tests of the rules: every planted fault in a story is reported, and nothing else."""

from __future__ import annotations

import pytest

from delaylevel.model.delivery import Delivery
from torture.invariants import violations
from torture.ledger import Cancelled, Confirmed, Received, Row, Sent, Stepped, Story
from torture.stage import Stage

ONCE = Stage("once", {}, ("dispatcher-1",), Delivery.EFFECTIVELY_ONCE)
LEAST = Stage("least", {}, ("run-1",), Delivery.AT_LEAST_ONCE)
SUBSCRIPTIONS = ("exclusive", "shared")
DUE_MS = 1_000_000


def sent(name: str = "m", target: str = "orders", expires_ms: int = 0) -> list[Row]:
    return [
        Sent(name, target, DUE_MS, DUE_MS - 5_000, "sum", expires_ms),
        Confirmed(name, DUE_MS - 4_900, 1),
    ]


def received(
    name: str = "m", target: str = "orders", place: str = "1:0", early_ms: int = 0, **changes: str
) -> list[Row]:
    """Return an arrival at each subscription."""
    times = DUE_MS - early_ms, DUE_MS - early_ms + 3
    last = {"checksum": "sum", "message_id": name, **changes}
    return [Received(name, target, each, place, *times, **last) for each in SUBSCRIPTIONS]


def cancelled(status: str, released_ms: int = 0, decided_ms: int = 0) -> Row:
    return Cancelled("m", DUE_MS - 100, status, released_ms, decided_ms)


def stepped(part: str, offset_ms: int, until_ms: int = DUE_MS) -> Row:
    return Stepped(part, offset_ms, DUE_MS - 10_000, until_ms)


def told(*rows: Row) -> Story:
    story = Story({"orders": ONCE, "bills": LEAST}, frozenset(SUBSCRIPTIONS))
    story.add(rows)
    return story


def rules_broken(*rows: Row) -> set[str]:
    return {found.rule for found in violations(told(*rows))}


SOON, LATER = sent(expires_ms=DUE_MS + 2_000), sent(expires_ms=DUE_MS + 3_600_000)
BILLS, LATE = sent(target="bills"), (DUE_MS, DUE_MS - 500)
AGAIN = received(place="1:1")


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        ("lost", sent()),
        ("lost", [*sent(), received()[0]]),
        ("lost", [*sent(), cancelled("unknown")]),
        ("lost", LATER),
        ("lost", [*SOON, received()[0]]),
        ("expired", [*SOON, *received(early_ms=-60_000)]),
        ("early", [*sent(), *received(early_ms=1)]),
        ("early", [*BILLS, *received(target="bills", early_ms=4)]),
        ("early", [*sent(), *received(early_ms=501), stepped("dispatcher-1", 500)]),
        ("early", [*sent(), *received(early_ms=1), stepped("dispatcher-1", -500)]),
        ("early", [*sent(), *received(early_ms=500), stepped("run-1", 500)]),
        ("early", [*sent(), *received(early_ms=500), stepped("dispatcher-1", 500, DUE_MS - 2_600)]),
        ("changed", [*sent(), *received(checksum="other")]),
        ("changed", [*sent(), *received(target="bills")]),
        ("copied", [*sent(), *received(), *AGAIN]),
        ("another id", [*sent(), *received(), *received(place="1:1", message_id="n")]),
        ("another id", [*sent(), *sent("n"), *received(), *received("n", message_id="m")]),
        ("false outcome", [*sent(), *received(), cancelled("cancelled")]),
        ("false outcome", [*sent(), cancelled("cancelled"), cancelled("too late")]),
        ("false outcome", [*sent(), cancelled("too late")]),
        ("false outcome", [*sent(), *received(), cancelled("accepted")]),
        ("false outcome", [*sent(), *received(), cancelled("too late", 9, 8)]),
        (
            "false outcome",
            [*sent(), *received(), cancelled("too late", *LATE), stepped("run-1", 500)],
        ),
        (
            "false outcome",
            [*sent(), *received(), cancelled("too late", *LATE), stepped("dispatcher-1", -499)],
        ),
        ("never sent", received()),
    ],
)
def test_a_planted_fault_is_reported(rule: str, rows: list[Row]) -> None:
    assert rule in rules_broken(*rows)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([*sent(), *received()], id="no fault"),
        pytest.param([*sent(), cancelled("cancelled"), cancelled("accepted")], id="cancelled"),
        pytest.param([*sent(), *received(), cancelled("too late")], id="too late"),
        pytest.param([*sent(), *received(), cancelled("unknown")], id="unknown"),
        pytest.param([*sent(), *received(), cancelled("requested")], id="killed while it asked"),
        pytest.param([sent()[0]], id="not confirmed, not received"),
        pytest.param([sent()[0], *received()], id="not confirmed, received"),
        pytest.param([*sent(), *received(), *received()], id="delivered again"),
        pytest.param(
            [*BILLS, *received(target="bills"), *received(target="bills", place="1:1")],
            id="copies at least once",
        ),
        pytest.param(SOON, id="expired"),
        pytest.param([*SOON, cancelled("unknown")], id="expired, and then cancelled"),
        pytest.param(
            [*sent(), *received(early_ms=500), stepped("dispatcher-1", 500)], id="clock ahead"
        ),
        pytest.param(
            [*sent(), *received(), cancelled("too late", *LATE), stepped("dispatcher-1", -500)],
            id="decided by a clock that was behind",
        ),
    ],
)
def test_what_is_allowed_is_not_reported(rows: list[Row]) -> None:
    assert rules_broken(*rows) == set()
