"""One run: it starts the scene, breaks it at random, lets it recover, and audits the ledgers."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import psutil
import pulsar

from delaylevel.errors import BrokerError, DelayLevelError
from delaylevel.model.outcome import Outcome
from support.world import quiet_client, stored_messages

from .faults import ALL, Fault, Undo
from .invariants import Violation, violations
from .ledger import Cancelled, LedgerReader, Story, now_ms
from .scene import Scene, StageError
from .stage import MOST_ADDED, SUBSCRIPTIONS

_BEGIN_S = 240.0
# Longest wait for the flow after a fault, and for everything after the last one.
_RECOVERY_S = 90.0
_DRAIN_S = 420.0
# Share of the faults that come before the one before has ended or everything flows again.
_OVERLAP = 0.3
# What a fault raises if it cannot be injected or undone.
_FAILURES = (DelayLevelError, pulsar.PulsarException, StageError, OSError, psutil.Error)


class Blow(NamedTuple):
    """A fault that was injected, or could not be, with the error that it or its repair raised."""

    kind: str
    at_ms: int
    lasted_s: float
    failure: str = ""


class Current(NamedTuple):
    fault: Fault
    undo: Undo
    began_ms: int
    lasts_s: float


@dataclass
class Result:
    """The result of a run.

    Attributes:
        late_ms: lateness of the first arrivals, by name of the quantile.
        drain_s: time from the end of the last fault until nothing was on its way.
    """

    seed: int
    minutes: float
    blows: list[Blow] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    late_ms: dict[str, int] = field(default_factory=dict)
    drain_s: float = 0.0
    unfinished: int = 0

    @property
    def ok(self) -> bool:
        """True if everything that is promised was kept."""
        return not self.violations and not self.unfinished

    @property
    def faults(self) -> Counter[str]:
        return Counter(blow.kind for blow in self.blows if blow.lasted_s or not blow.failure)

    def as_json(self) -> str:
        """Return everything, with the number of violations of each rule, and the first ones."""
        values = {
            **asdict(self),
            "ok": self.ok,
            "faults": self.faults,
            "blows": [blow._asdict() for blow in self.blows],
            "violations": Counter(each.rule for each in self.violations),
            "examples": [each._asdict() for each in self.violations[:200]],
        }
        return json.dumps(values, indent=1)


class Torture:
    def __init__(self, scene: Scene, minutes: float) -> None:
        self._scene = scene
        self._chosen = random.Random(scene.seed)
        self._say = scene.say
        self._result = Result(scene.seed, minutes)
        self._reader = LedgerReader(scene.ledgers)
        targets = {
            stage.target(index): stage
            for stage in scene.stages
            for index in range(len(stage.partitions) + MOST_ADDED)
        }
        self._story = Story(targets, frozenset(SUBSCRIPTIONS))

    def run(self) -> Result:
        """Run from the beginning to the audit; stop everything at the end, whatever happens."""
        try:
            self._scene.start()
            self._await_flow(now_ms(), _BEGIN_S, "the first messages")
            self._say("everything flows")
            self._break(time.monotonic() + self._result.minutes * 60)
            self._drain()
            self._audit()
        finally:
            self._scene.close()
        return self._result

    # -- faults

    def _break(self, until_s: float) -> None:
        current: list[Current] = []
        while time.monotonic() < until_s:
            self._inject(current)
            if current and self._chosen.random() < _OVERLAP and not current[-1].fault.alone:
                self._pause(self._chosen.uniform(0.1, 1.0))
                continue
            self._end(current)
            self._pause(self._chosen.uniform(0.0, 2.0))
        if current:
            self._end(current)

    def _inject(self, current: list[Current]) -> None:
        """Inject a fault at random, and add it to those that are there.

        One that cannot be injected is undone as far as it came, and noted with its failure.
        """
        present = {each.fault.name for each in current}
        possible = [
            fault
            for fault in ALL
            if fault.name not in present and not (current and fault.alone) and self._possible(fault)
        ]
        if not possible:
            return
        weights = [fault.weight for fault in possible]
        (fault,) = self._chosen.choices(possible, weights)
        began_ms = now_ms()
        self._say(f"fault {len(self._result.blows) + len(current) + 1}: {fault.name}")
        undo = Undo()
        try:
            fault.inject(self._scene, self._chosen, undo)
        except _FAILURES as error:
            self._say(f"  not injected: {error!r}")
            failure = f"{repr(error)[:300]} {self._undo(undo)}".strip()
            self._result.blows.append(Blow(fault.name, began_ms, 0.0, failure))
            return
        current.append(Current(fault, undo, began_ms, self._chosen.uniform(*fault.lasts_s)))

    def _undo(self, undo: Undo) -> str:
        """Repair all that a fault has broken; return the error if that fails, or nothing."""
        try:
            undo.close()
        except _FAILURES as error:
            self._say(f"  not undone: {error!r}")
            return repr(error)[:300]
        return ""

    def _end(self, current: list[Current]) -> None:
        """Undo all present faults, each at its time, and wait until everything flows again."""
        for each in sorted(current, key=lambda each: each.began_ms + each.lasts_s * 1000):
            self._pause(each.lasts_s - (now_ms() - each.began_ms) / 1000)
            failure = self._undo(each.undo)
            lasted_s = (now_ms() - each.began_ms) / 1000
            self._result.blows.append(Blow(each.fault.name, each.began_ms, lasted_s, failure))
        current.clear()
        undone_ms = now_ms()
        try:
            self._await_flow(undone_ms, _RECOVERY_S, "the flow")
            self._say(f"  everything flows again after {(now_ms() - undone_ms) / 1000:.1f} s")
        except StageError:
            overdue = self._story.overdue(undone_ms)
            self._say(f"  no flow in {_RECOVERY_S:.0f} s: {len(overdue)} overdue {overdue[:2]}")

    def _await_flow(self, since_ms: int, seconds: float, what: str) -> None:
        def flows() -> bool:
            self._story.add(self._reader.new_rows())
            return self._story.flows_since(since_ms)

        self._scene.wait(flows, what, seconds)

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self._scene.stopping.wait(seconds):
            raise StageError("the run ends")

    def _possible(self, fault: Fault) -> object:
        try:
            return fault.possible(self._scene)
        except _FAILURES:
            return False

    # -- the end

    def _drain(self) -> None:
        self._say("draining")
        self._scene.control.sending = False
        self._scene.save_control()
        began_s = time.monotonic()

        def drained() -> bool:
            self._story.add(self._reader.new_rows())
            if self._story.open and self._story.open <= self._story.cancelled.keys():
                self._read_outcomes()
            return not self._story.open

        with contextlib.suppress(StageError):
            self._scene.wait(drained, "the end of all messages", _DRAIN_S)
        # Copies come soon after, if at all.
        self._pause(5)
        self._read_outcomes()
        self._story.add(self._reader.new_rows())
        self._result.drain_s = time.monotonic() - began_s
        self._result.unfinished = len(self._story.open)

    def _read_outcomes(self) -> None:
        """Add the records of the outcomes topics to the story."""
        cancelled = self._story.cancelled
        client = quiet_client(self._scene.broker.connection)
        with contextlib.closing(client), contextlib.suppress(BrokerError):
            for stage in self._scene.stages:
                topic = self._scene.description(stage).outcomes_topic
                for message in stored_messages(client, self._scene.admin, topic.full):
                    outcome = Outcome.read(message.properties)
                    row = Cancelled.of(outcome, outcome.id, message.publish_ms)
                    if outcome.id in cancelled and row not in cancelled[outcome.id]:
                        self._story.add([row])

    def _audit(self) -> None:
        story, result = self._story, self._result
        result.violations = violations(story)
        late_ms = sorted(
            min(row.received_ms for row in rows) - story.sent[name].due_ms
            for name, rows in story.received.items()
            if name in story.sent
        )
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            at = min(int(len(late_ms) * share), len(late_ms) - 1)
            result.late_ms[name] = late_ms[at] if late_ms else 0
        places = sum(
            len(found) - 1 for name in story.received for found in story.arrivals(name).values()
        )
        says = [story.statuses(name) for name in story.cancelled]
        result.totals = {
            "sent": len(story.sent),
            "confirmed": len(story.confirmed),
            "not confirmed": len(story.sent) - len(story.confirmed),
            "received": len(story.received),
            "arrivals": sum(map(len, story.received.values())),
            "copies": places,
            "cancellations": len(story.cancelled),
            **{
                f"cancellations {status}": sum(status in each for each in says)
                for status in ("cancelled", "too late", "unknown", "failed")
            },
        }
