"""The level topics that a process serves, and its copies of their descriptions."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from delaylevel.cluster.failures import is_admin_away, may_pass, translate_errors
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import (
    BrokerError,
    DelayLevelError,
    InvalidInputError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.web.reports import ProbeCheck, ProblemLine, Reporter, StatusSection

from . import registry

log = logging.getLogger(__name__)

#: Age from which a description is read again, in s, by whatever moves or releases messages.
LIFETIME_S = 3.5
#: Age up to which messages are moved and released by a description, in s.
FRESH_S = 5.0
#: Age from which the description of a level topic at rest is read again, in s.
RESTING_S = 30.0
#: The shortest time between two reads that unknown targets cause, in s.
REFRESH_EVERY_S = 0.25


class DescriptionCache:
    """The description of a level topic, which its hosts read again while they run.

    Targets may be added at any time, and a client sends to a new target at once. So a target is
    unknown only if it is missing from a description whose reading began after the message was
    stored. No wall clock is needed for that: a host notes the monotonic time at which it knows of a
    message, and asks for a description that was read since.

    Other changes have to be seen within seconds, but only before a message is moved or released by
    them. So a level topic at rest is read rarely, and before each such decision `is_current` asks
    for one that is fresh.

    Several threads may use one cache. A description to begin with may have any age.
    """

    def __init__(
        self,
        read: Callable[[], LevelTopicDescription],
        description: LevelTopicDescription | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._read = read
        self._now_s = now_s
        self._wait = wait
        self.failing = self._is_outdated = False  # the last read
        # It lets another thread call `current`; any thread calls it. Without it, the host is
        # expected to call `current` every few seconds.
        self.ask: Callable[[], object] | None = None
        self._lock = threading.Lock()  # held during a read
        begun_s = now_s() if description is None else float("-inf")
        # The description, and the time at which its reading began: one value, so that a thread
        # that does not hold the lock never sees one without the other.
        self._known = description or read(), begun_s
        self._tried_s = self._ended_s = begun_s  # begin and end of the last try
        self._asked_s: float | None = None

    def latest(self) -> LevelTopicDescription:
        """Return the description as it was read last."""
        return self._known[0]

    def is_current(self) -> bool:
        """Return True, without waiting, if messages may be moved by the latest description."""
        now_s = self._now_s()
        if self.ask is None or now_s - self._ended_s < LIFETIME_S:
            return True
        if self._asked_s is None:
            self._asked_s = now_s
            self.ask()
        if self._is_outdated:
            return False
        # An admin interface that hangs does not stop the host.
        asked_s = self._asked_s
        waited = asked_s is None or now_s - asked_s > FRESH_S - LIFETIME_S
        return self.failing or waited or now_s - self._known[1] < FRESH_S

    def next_read_s(self, resting_s: float = 0.0) -> float:
        """Return the monotonic time of the next read by `current`, in s; argument as there."""
        is_asked = self._asked_s is not None
        return self._ended_s + (LIFETIME_S if is_asked else max(LIFETIME_S, resting_s))

    def current(self, resting_s: float = 0.0) -> LevelTopicDescription:
        """Return the description; read it again if the last read is some seconds ago.

        ``resting_s`` is the age, in s, that will do if nothing is decided by it. After a failure,
        the calls of the next seconds return the latest one; after an UpgradeRequiredError, every
        call reads and raises, because the host must not continue.
        """
        if self._now_s() < self.next_read_s(resting_s):
            return self.latest()
        if not self._lock.acquire(blocking=False):
            return self.latest()
        try:
            return self._read_now()
        finally:
            self._lock.release()

    def known(self, resting_s: float = 0.0) -> LevelTopicDescription:
        """Return the description as :meth:`current` does; the latest one without an answer."""
        try:
            return self.current(resting_s)
        except BrokerError as error:
            if not is_admin_away(error):
                raise
            return self.latest()

    def read_since(self, since_s: float) -> LevelTopicDescription | None:
        """Return the description, without a read, if its reading began at a time or later."""
        description, read_s = self._known
        return description if read_s >= since_s else None

    def refresh(self, since_s: float) -> LevelTopicDescription:
        """Return a description whose reading began at a time or later; read it if necessary."""
        with self._lock:  # one read answers all threads that wait for it
            found = self.read_since(since_s)
            if found is not None:
                return found
            pause_s = self._tried_s + REFRESH_EVERY_S - self._now_s()
            if pause_s > 0:
                self._wait(pause_s)
            return self._read_now()

    def _read_now(self) -> LevelTopicDescription:
        self._tried_s = self._now_s()
        failing, is_outdated = True, False
        try:
            found, known = self._read(), self.latest()
            # Hosts look by identity whether it has changed: it nearly never has.
            self._known = (known if found == known else found, self._tried_s)
            failing = False
        except UpgradeRequiredError:
            is_outdated = True
            raise
        finally:
            self.failing, self._is_outdated = failing, is_outdated
            self._ended_s = float("-inf") if is_outdated else self._now_s()
            self._asked_s = None
        return self.latest()


_LOOK_S = 5.0
# A search for level topics of other names asks for each topic of the namespace. A topic that is no
# level topic becomes one only if it is deleted and created again.
_SEARCH_S = 60.0


class Roster:
    """The level topics that were named, and all of a namespace.

    One that cannot be served, such as one in a later format, is reported, and does not keep the
    process from serving the others. It is tried again every few seconds; one of another than the
    default name is searched for once a minute.

    Args:
        serve: begins to serve a level topic that was named (True) or found, or raises BrokerError
            or InvalidInputError.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        names: Sequence[str],
        serve: Callable[[LevelTopicDescription, bool], None],
        namespace: str | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admin = admin
        self.names = tuple(dict.fromkeys(names))
        self._serve = serve
        self.namespace = namespace
        self._now_s = now_s
        self._look_s = float("-inf")
        self._search_s = float("-inf")
        self._found: dict[str, str] = {}  # name -> level topic
        self._members: set[str] = set()  # parts of the level topics of the namespace
        self._others: set[str] = set()  # its other topics that are not served
        self.errors: dict[str, DelayLevelError] = {}
        self._warning = RepeatedWarning(log, f"level topics of {namespace}")

    @property
    def refused(self) -> Mapping[str, str]:
        """The reason for each level topic that cannot be served now, by its name."""
        return {name: str(error) for name, error in self.errors.copy().items()}

    def start(self) -> None:
        """Begin to serve the level topics; raise the first reason if none that was named can be."""
        searching = self._begin_look()
        self._look_at_named(frozenset(), searching)
        if self.names and len(self.errors) == len(self.names):
            raise next(iter(self.errors.values()))
        if self.namespace is not None:
            # Those that were named may be in the namespace, too.
            served = frozenset(self._found[name] for name in self._found if name not in self.errors)
            self._look_at_namespace(served, searching)

    def look(self, served: Iterable[str]) -> Sequence[str]:
        """Begin to serve what can be served now, and return those deleted from the namespace."""
        if self._now_s() < self._look_s:
            return ()
        searching = self._begin_look()
        known = frozenset(served)
        self._look_at_named(known, searching)
        if self.namespace is None:
            return ()
        try:
            gone = self._look_at_namespace(known, searching)
        except BrokerError as error:
            self._warning.failed(error)
            return ()
        self._warning.over()
        return gone

    def _begin_look(self) -> bool:
        """Plan the next look, and return True if this one searches."""
        now_s = self._now_s()
        self._look_s = now_s + _LOOK_S
        if now_s < self._search_s:
            return False
        self._search_s = now_s + _SEARCH_S
        return True

    def _look_at_named(self, served: frozenset[str], searching: bool) -> None:
        now = set(served)
        for name in self.names:
            if self._found.get(name, name) in now:
                continue
            with self._trying(name):
                known = self.errors.get(name)
                if known is not None and not searching and not may_pass(known):
                    topic = TopicName.parse(name).without_partition
                    if not registry.without_search(self._admin, topic):
                        raise known.with_traceback(None)
                description = registry.describe(self._admin, name, search=True)
                self._found[name] = description.topic
                if description.topic not in now:
                    self._serve(description, True)
                    now.add(description.topic)

    def _look_at_namespace(self, served: frozenset[str], searching: bool) -> Sequence[str]:
        assert self.namespace is not None
        with translate_errors():
            names = registry.partitioned_topics(self._admin, self.namespace)
            there = {name.full for name in names}
            self._members &= there
            known = served | self._members
            if not searching:
                # Requests for all, again and again, would cost more than all other work at rest.
                known |= self._others
            unknown = [name for name in names if name.full not in known]
            listed = registry.level_topics_of(self._admin, unknown)
        found = {item.topic for item in listed}
        self._others = there - served - found
        for item in listed:
            with self._trying(item.topic):
                if item.description is None:
                    raise LevelTopicError(item.problem or item.topic)
                self._serve(item.description, False)
                members = {member.topic.full for member in item.description.members()}
                self._members |= members - {item.topic}
        for gone in [name for name in self.errors if name not in (*self.names, *found)]:
            del self.errors[gone]
        return sorted(served - there)

    @contextlib.contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        """Note the error of an attempt to serve a level topic, or that it is served now."""
        try:
            with translate_errors():
                yield
        except (BrokerError, InvalidInputError) as error:
            if str(self.errors.get(name)) != str(error):
                log.warning("level topic %s is not served: %s", name, error)
            self.errors[name] = error
            return
        if self.errors.pop(name, None) is not None:
            log.info("level topic %s is served now", name)


class RosterReporter(Reporter):
    """Reporter of the level topics that a process cannot serve; ``remedy`` is a sentence."""

    def __init__(
        self, roster: Roster, remedy: str = "It is tried again every few seconds."
    ) -> None:
        self._roster = roster
        self._remedy = remedy

    def ready(self) -> Sequence[ProbeCheck]:
        # Anybody may create one in a namespace: it does not end the readiness for the others.
        named = self._roster.names
        return [
            ProbeCheck(f"level topic {name}", name not in named, f"it is not served: {text}")
            for name, text in self._roster.refused.items()
        ]

    def status(self) -> Sequence[StatusSection]:
        return [
            StatusSection(
                name, {}, problems=[ProblemLine(f"It is not served: {text}", self._remedy)]
            )
            for name, text in self._roster.refused.items()
        ]

    def collect(self) -> Iterator[Any]:
        """Yield the series, in the form that ``prometheus_client`` expects."""
        from prometheus_client.core import GaugeMetricFamily

        text = "1 for each level topic that the process cannot serve now."
        series = GaugeMetricFamily("delaylevel_process_refused", text, labels=("level_topic",))
        for name in sorted(self._roster.refused):
            series.add_metric((name,), 1)
        yield series
