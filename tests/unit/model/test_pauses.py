"""Tests of the pauses of a level topic."""

from __future__ import annotations

from delaylevel.model.level_topic import ALL, Pauses, Spread

A, B = "persistent://public/default/a", "persistent://public/default/b"


def test_a_pause_of_one_target_or_of_all() -> None:
    pauses = Pauses().pause(A, 1_000)
    assert pauses.paused_since_ms(A) == 1_000
    assert pauses.paused_since_ms(B) is None
    assert pauses.pause(A, 2_000) == pauses
    both = pauses.pause(ALL, 3_000)
    assert both.paused_since_ms(A) == 1_000
    assert both.paused_since_ms(B) == 3_000
    assert both.resume(ALL, 4_000) == Pauses()
    assert both.resume(A, 4_000).paused_since_ms(A) == 3_000


def test_the_messages_of_a_pause_leave_evenly() -> None:
    pauses = Pauses().pause(A, 0).resume(A, 10_000, 60_000)
    spread = pauses.spread(A, 10_000)
    assert spread == Spread(10_000, 60_000)
    assert pauses.spread(B, 10_000) is None
    assert pauses.spread(A, 70_001) is None
    assert pauses.spread(A, 9_000) == spread, "another clock is behind"
    assert pauses.spread(A, -50_001) is None
    left, last_ms, released = 6_000, 10_000, []
    for now_ms in range(10_000, 70_001, 1_000):
        count, last_ms = spread.take(left, last_ms, now_ms)
        left -= count
        released.append(count)
    assert left == 0
    assert released == [0, *[100] * 60]
    assert spread.take(5, 0, 70_000) == (5, 70_000)
    assert spread.take(5, 70_000, 69_999) == (5, 69_999), "the clock was set back"


def test_the_time_of_the_next_release() -> None:
    spread = Spread(1_000, 8_000)
    assert spread.next_ms(4, 0) == 3_000
    assert spread.take(4, 0, 2_999)[0] == 0
    assert spread.take(4, 0, 3_000) == (1, 3_000)
    assert spread.next_ms(1_000_000, 2_000) == 2_050
    assert spread.next_ms(1, 9_000) == 9_000


def test_a_spread_that_is_over_is_forgotten_at_the_next_change() -> None:
    pauses = Pauses().pause(A, 0).resume(A, 10, 60).pause(B, 50)
    assert dict(pauses.resumed) == {A: Spread(10, 60)}
    assert pauses.resume(B, 71).resumed == ()


def test_a_pause_lasts_until_what_has_waited_is_released() -> None:
    paused = Pauses().pause(A, 0)
    assert not Pauses().last(0)
    assert paused.last(1_000_000)
    assert not paused.resume(A, 10).last(10)
    spread = paused.resume(A, 10, 60)
    assert [spread.last(now_ms) for now_ms in (10, 69, 70)] == [True, True, False]
