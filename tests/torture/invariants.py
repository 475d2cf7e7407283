"""The rules that every run has to keep: pure functions of a story.

A rule believes only what a process noted before or after its own act, and what a consumer got.

`lost`
    A message that was confirmed arrives at every subscription, unless its cancellation has the
    outcome ``cancelled`` (with ``unknown``, it had no effect). A message whose send failed or was
    interrupted may arrive. One that expires soon after it is due may be dropped, but then for all
    subscriptions; one that expires in an hour may not, whatever any clock says for a moment.
`expired`
    No message is released after it has expired. What was on its way to a target that did not
    answer may arrive later.
`early`
    No message comes before it is due, by the machine's clock, which no fault changes. Effectively
    once, the time of the release counts; at least once, messages share batches, which have one time
    for all, so that of the arrival counts. A dispatcher decides by its own clock, and so does a
    producer about messages that are due when they are sent. While a fault has set that clock ahead,
    these messages may be early by as much; and for `_STEP_LASTS_MS` more, because a message that
    was given to the client is on its way. There is no other tolerance.
`changed`
    Body, properties, keys and event time are those that were sent, and the topic is the target.
`copied`
    With effectively-once delivery, a message has one place in its target. (A redelivery to a
    consumer that did not acknowledge has the same place.)
`another_id`
    All arrivals of a message have one ``delaylevel.id``, and no other message has it.
`false_outcome`
    ``cancelled``: the message never arrives. ``too late``: it has arrived, and its release was not
    after the decision, except for a clock that was wrong meanwhile. No message has both. A
    cancellation that was accepted has an outcome.
`never_sent`
    Only messages that were sent arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .ledger import CANCELLED, TOO_LATE, Cancelled, Received, Sent, Story

# A message that a dispatcher takes for due is sent within this time, unless it waits for its target
# (then it is not early any more).
_STEP_LASTS_MS = 2_000
# A message that is on its way when it expires is not called back from a target that hangs.
_ON_ITS_WAY_MS = 30_000


class Violation(NamedTuple):
    """A rule that a message breaks, and how."""

    rule: str
    name: str
    text: str


def lost(story: Story) -> Iterator[Violation]:
    for name in story.confirmed:
        if missing := story.missing(name):
            sent = story.sent[name]
            text = f"due {sent.due_ms}, {sent.target}: not received by {', '.join(sorted(missing))}"
            yield Violation("lost", name, text)


def expired(story: Story) -> Iterator[Violation]:
    for sent, received in _arrivals(story):
        if sent.expires_ms and received.published_ms > sent.expires_ms + _ON_ITS_WAY_MS:
            by_ms = received.published_ms - sent.expires_ms
            yield Violation("expired", sent.name, f"published {by_ms} ms after it had expired")


def early(story: Story) -> Iterator[Violation]:
    for sent, received in _arrivals(story):
        once = story.stages[received.target].once
        by_ms = sent.due_ms - (received.published_ms if once else received.received_ms)
        if by_ms > 0 and by_ms > _ahead_ms(story, received):
            text = f"{by_ms} ms early at {received.subscription} of {received.target}"
            yield Violation("early", sent.name, text)


def _ahead_ms(story: Story, received: Received) -> int:
    """Return by how much a message may be early, because a clock was ahead at its release."""
    clocks = story.stages[received.target].clocks
    return max(
        (
            step.offset_ms
            for step in story.steps
            if step.part in clocks
            and step.from_ms <= received.published_ms <= step.until_ms + _STEP_LASTS_MS
        ),
        default=0,
    )


def changed(story: Story) -> Iterator[Violation]:
    for sent, received in _arrivals(story):
        if received.checksum != sent.checksum:
            yield Violation("changed", sent.name, f"contents differ at {received.subscription}")
        if received.target != sent.target:
            yield Violation("changed", sent.name, f"sent to {sent.target}, in {received.target}")


def copied(story: Story) -> Iterator[Violation]:
    for name, sent in story.sent.items():
        if not story.stages[sent.target].once:
            continue
        for subscription, places in story.arrivals(name).items():
            if len(places) > 1:
                text = f"{[row.place for row in places]} at {subscription} of {sent.target}"
                yield Violation("copied", name, text)
                break


def another_id(story: Story) -> Iterator[Violation]:
    owners: dict[str, str] = {}
    for name, rows in story.received.items():
        ids = {row.message_id for row in rows}
        if len(ids) > 1:
            yield Violation("another id", name, f"copies with the IDs {sorted(ids)}")
        for message_id in ids - {""}:
            owner = owners.setdefault(message_id, name)
            if owner != name:
                yield Violation("another id", name, f"{message_id} is also the ID of {owner}")


def false_outcome(story: Story) -> Iterator[Violation]:
    for name, rows in story.cancelled.items():
        says, arrived = story.statuses(name), story.received.get(name, [])
        found = {
            "both cancelled and too late": {CANCELLED, TOO_LATE} <= says,
            "cancelled, but it arrived": CANCELLED in says and arrived,
            "too late, but it never arrived": TOO_LATE in says and not arrived,
            "accepted, and never decided": story.undecided(name),
            "released after it was too late": any(
                row.released_ms
                and 0 < row.decided_ms < row.released_ms - _disorder_ms(story, name, row)
                for row in rows
            ),
        }
        for text, wrong in found.items():
            if wrong:
                yield Violation("false outcome", name, text)


def _disorder_ms(story: Story, name: str, row: Cancelled) -> int:
    """Return by how much a decision may seem to be before the release that it reports.

    The two dispatchers that released and decided have clocks of their own.
    """
    clocks = story.stages[story.sent[name].target].clocks
    since_ms = min(row.released_ms, row.decided_ms)
    return max(
        (
            abs(step.offset_ms)
            for step in story.steps
            if step.part in clocks
            and step.from_ms <= row.at_ms
            and step.until_ms + abs(step.offset_ms) >= since_ms
        ),
        default=0,
    )


def never_sent(story: Story) -> Iterator[Violation]:
    for name in story.received.keys() - story.sent.keys():
        yield Violation("never sent", name, "received, but not sent")


RULES: tuple[Callable[[Story], Iterator[Violation]], ...] = (
    *(lost, expired, early, changed),
    *(copied, another_id, false_outcome, never_sent),
)


def violations(story: Story) -> list[Violation]:
    return [found for rule in RULES for found in rule(story)]


def _arrivals(story: Story) -> Iterator[tuple[Sent, Received]]:
    for name, rows in story.received.items():
        sent = story.sent.get(name)
        if sent is not None:
            for row in rows:
                yield sent, row
