"""The whole path of a message through levels, if every hop is on time."""

from __future__ import annotations

from delaylevel.model.router import Hop, Router


def hop_times(router: Router, delay_ms: int) -> list[int]:
    """Return the times of all hops of a message after publishing, ms; the last one is its due time.

    Each other one is the time at which the message leaves a level. So there is one more than the
    message is parked.

    Raises:
        DelayTooLongError: the delay is beyond the longest level, and overflow is "reject".
    """
    times: list[int] = []
    now_ms, level = 0, None
    while (hop := router.decide(delay_ms, now_ms, level)).hop is Hop.PARK:
        level = hop.level
        now_ms = router.hand_off_ms(level, hop.partition, now_ms)
        times.append(now_ms)
    return [*times, delay_ms]
