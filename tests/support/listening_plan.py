"""The plan of a test with listeners: the fate of every attempt, and an audit of what happened.

The application (``listening_app``) and the test compute the same fates, so the test knows the
attempts of every message. The handler appends a line to the audit before and after each attempt. A
line that was written survives ``kill -9``.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

SETTINGS = "LISTENING_PLAN"
LATER_MS = 3_000


class Fate(enum.Enum):
    """The end of an attempt."""

    HANDLED = "handled"
    FAILED = "failed"
    LATER = "later"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Plan:
    """The configuration of the application.

    Attributes:
        topic: the business topic.
        audit: path of the audit.
        is_coroutine: True for a coroutine function.
        subscription_type: as in ``Listeners.on``.
        delays_ms: delays between attempts.
        concurrency: number of calls at the same time.
        deduplicate: True to store handled IDs in a topic.
        work_ms: longest duration of a call.
        seed: the seed of all fates.
    """

    topic: str
    audit: str
    is_coroutine: bool = False
    subscription_type: str = "Shared"
    delays_ms: tuple[int, ...] = (1_000, 2_000)
    concurrency: int = 8
    deduplicate: bool = False
    work_ms: float = 5.0
    seed: int = 21

    subscription = "application"

    @classmethod
    def of_environment(cls) -> Plan:
        """Return the plan of this process."""
        values = json.loads(os.environ[SETTINGS])
        return cls(**{**values, "delays_ms": tuple(values["delays_ms"])})

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the application."""
        return {SETTINGS: json.dumps(asdict(self))}

    def chance(self, number: int, attempt: int) -> random.Random:
        """Return the source of all that is random in an attempt."""
        return random.Random(f"{self.seed} {number} {attempt}")

    def fate(self, number: int, attempt: int) -> Fate:
        """Return the end of an attempt, from 1, of a message."""
        if number % 50 == 7:
            return Fate.FAILED
        at = self.chance(number, attempt).random()
        if at < 0.005:
            return Fate.REJECTED
        if at < 0.03:
            return Fate.LATER
        return Fate.FAILED if at < 0.3 else Fate.HANDLED

    def fates(self, number: int) -> list[Fate]:
        """Return the ends of all attempts of a message."""
        found: list[Fate] = []
        for attempt in range(1, len(self.delays_ms) + 2):
            found.append(self.fate(number, attempt))
            if found[-1] in (Fate.HANDLED, Fate.REJECTED):
                break
        return found

    def delay_ms(self, number: int, attempt: int) -> int:
        """Return the time from the end of a failed attempt to the next one."""
        if self.fate(number, attempt) is Fate.LATER:
            return LATER_MS
        return self.delays_ms[attempt - 1]

    def is_handled(self, number: int) -> bool:
        """Return True if a message is handled with success in the end; else it is dead."""
        return self.fates(number)[-1] is Fate.HANDLED


class Line(NamedTuple):
    """A line of the audit.

    Attributes:
        event: ``begin`` or the fate of the attempt.
        number: number of the message.
        attempt: number of the attempt, from 1.
        at_ms: time of the event, ms since the epoch.
        process: ID of the process.
        message_id: ID of the message.
        first_published_ms: time of the first publish, ms since the epoch.
        topic: the business topic.
    """

    event: str
    number: int
    attempt: int
    at_ms: int
    process: int
    message_id: str
    first_published_ms: int
    topic: str


class AuditFile:
    """An audit that several threads and processes append to."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def append(self, event: str, number: int, message: Any) -> None:
        """Append a line about a received message."""
        line = Line(
            event,
            number,
            message.attempt,
            time.time_ns() // 1_000_000,
            os.getpid(),
            message.id,
            message.first_published_ms,
            message.topic,
        )
        os.write(self._file, (" ".join(map(str, line)) + "\n").encode())


def read_audit(path: Path) -> Iterator[Line]:
    """Yield the lines of an audit."""
    if not path.exists():
        return
    for text in path.read_text().splitlines():
        event, number, attempt, at, process, message_id, published, topic = text.split(" ")
        yield Line(
            event,
            int(number),
            int(attempt),
            int(at),
            int(process),
            message_id,
            int(published),
            topic,
        )


class Audit:
    """The attempts of every message.

    Attributes:
        begun: times of the beginnings of each attempt, by number and attempt.
        ended: times of its ends, by number and attempt.
        handled: number of successful handlings of each message.
    """

    def __init__(self, plan: Plan, path: Path) -> None:
        self.plan = plan
        self.begun: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.handled: dict[int, int] = defaultdict(int)
        self.lines = list(read_audit(path))
        for line in self.lines:
            place = line.number, line.attempt
            if line.event == "begin":
                self.begun[place].append(line.at_ms)
            else:
                self.ended[place].append(line.at_ms)
                if line.event == Fate.HANDLED.value:
                    self.handled[line.number] += 1

    @functools.cached_property
    def repeated(self) -> int:
        """The number of attempts that ended more than once, counting each repetition."""
        return sum(len(times) - 1 for times in self.ended.values())

    @functools.cached_property
    def handled_again(self) -> int:
        """The number of successful handlings of messages that were handled before."""
        return sum(times - 1 for times in self.handled.values())

    def check(self, numbers: range) -> None:
        """Check that every message had the attempts that the plan has, none of them early."""
        wrong: list[str] = []
        for number in numbers:
            fates = self.plan.fates(number)
            seen = sorted(attempt for attempt in range(1, 20) if (number, attempt) in self.ended)
            if seen != list(range(1, len(fates) + 1)):
                wrong.append(f"{number}: attempts {seen}, not {len(fates)}")
                continue
            for attempt in seen[1:]:
                planned = min(self.ended[number, attempt - 1])
                planned += self.plan.delay_ms(number, attempt - 1)
                early = planned - min(self.begun[number, attempt])
                if early > 0:
                    wrong.append(f"{number}: attempt {attempt} was {early} ms early")
        assert not wrong, f"{len(wrong)} wrong, e.g. {wrong[:10]}"
        assert {line.number for line in self.lines} <= set(numbers)
        self._check_constants()

    def _check_constants(self) -> None:
        """Check that the fate was the planned one, and the ID the same for all attempts."""
        ids: dict[int, set[tuple[str, int, str]]] = defaultdict(set)
        for line in self.lines:
            ids[line.number].add((line.message_id, line.first_published_ms, line.topic))
            if line.event != "begin":
                assert line.event == self.plan.fate(line.number, line.attempt).value
        changed = {number: found for number, found in ids.items() if len(found) > 1}
        assert not changed, list(changed.items())[:5]

    def late_ms(self) -> list[int]:
        """Return the times from planned to real beginnings of attempts after the first."""
        found = []
        for (number, attempt), begun in self.begun.items():
            if attempt > 1 and (number, attempt - 1) in self.ended:
                planned = min(self.ended[number, attempt - 1])
                planned += self.plan.delay_ms(number, attempt - 1)
                found.append(min(begun) - planned)
        return sorted(found)
