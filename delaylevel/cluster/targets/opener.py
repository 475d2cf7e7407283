"""Opening and closing of a producer in the background, with retries.

If a broker dies, another one serves its topics after the end of its session (30 s by default) and
some seconds more. The client looks for the topic again and again, but doubles the pause between two
attempts, up to a minute. So a producer that has lost its connection is replaced as soon as a broker
serves the topic.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from delaylevel.cluster.failures import close_quietly, error_name
from delaylevel.cluster.threads import HostLoop, is_crowded
from delaylevel.errors import BrokerError, ClientError, DelayLevelError

from .send_state import EntryLimits

log = logging.getLogger(__name__)

# An opening that does not end is slow, not refused: before it hands over a producer's name, the
# broker waits for some seconds for the connection of a process that hangs. It refuses the name,
# for as long, if it has noticed nothing yet.
SLOW_PATIENCE_S = 30.0
_SLOW = "it does not answer"
_SLOW_FAILURES = (_SLOW, "ProducerBusy")
#: A target gets no more messages after this time without an opening that succeeds, or without a
#: connection and any confirmation, unless its host is more patient.
STALL_S = 5.0
_RETRY_S = 0.1
_LONGEST_RETRY_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Refusal(Enum):
    """Kind of a failed opening."""

    GONE = "gone"  # the topic does not exist, or nobody can receive from it
    REFUSED = "refused"  # the topic takes no producer now
    UNAVAILABLE = "unavailable"  # no answer; it may be served in a moment


class OpeningError(DelayLevelError):
    """A topic that cannot be opened."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason

    @classmethod
    def of(cls, error: Exception) -> OpeningError:
        """Return the opening error for any error."""
        if isinstance(error, OpeningError):
            return error
        if isinstance(error, ClientError):
            kind = Refusal.UNAVAILABLE if error.transient else Refusal.REFUSED
            return cls(kind, error.name)
        if not isinstance(error, BrokerError):
            log.error("opening a producer failed", exc_info=error)
        return cls(Refusal.UNAVAILABLE, str(error) or error_name(error))


@dataclass
class Opened:
    """A producer that was opened.

    Attributes:
        max_size: limit of the topic itself for an entry, in bytes; None without one.
        entry_limits: limits of its batches; None if it has none, or their messages are not known.
        shared: True if it writes to several partitions, which may be at different brokers.
        remembered: True if nobody could look at the topic, so that a sequence ID that it has stored
            is perhaps that of a new topic.
    """

    producer: Any
    last_number: int = -1
    max_size: int | None = None
    entry_limits: EntryLimits | None = None
    shared: bool = False
    remembered: bool = False


class Opener:
    """Opens one producer at a time, and closes it, in threads of their own.

    One thread uses it; results come through ``report``.

    Args:
        report: function that is called in any thread with work for the owner's thread.
        patience_s: time without an answer after which there is no hope of one, in s.
    """

    def __init__(
        self,
        open_producer: Callable[[], Opened],
        opened: Callable[[Opened | OpeningError], None],
        report: Callable[[Callable[[], None]], None],
        patience_s: float,
        loop: HostLoop,
    ) -> None:
        self._open_producer = open_producer
        self._opened = opened
        self._report = report
        self._patience_s = patience_s
        self._start, self._now_s = loop.start, loop.now_s
        self._working = False  # True while a thread opens or closes
        self._ended = False
        self._lock = threading.Lock()  # of _ended, which the opening thread reads
        self._failure: str | None = None  # while openings fail, or one does not end
        self._failing_since_s = 0.0
        # The reason if the last opening was refused, and whether the owner has still to hear of it.
        self._refusal: str | None = None
        self._is_news = False
        self._retry_at_s = 0.0
        self._retry_s = _RETRY_S

    @property
    def hopeless(self) -> str | None:
        """The reason why openings have failed for too long; None while success is likely."""
        if self._failure is None or self._is_outdated:
            return None
        patience_s = self._patience_s
        if self._failure in _SLOW_FAILURES:
            patience_s = max(patience_s, SLOW_PATIENCE_S)
        waited_s = self._now_s() - self._failing_since_s
        return self._failure if waited_s > patience_s else None

    def forgive(self, pause_s: float) -> None:
        """Leave out a time in which this process was suspended, in s."""
        self._failing_since_s = min(self._failing_since_s + pause_s, self._now_s())

    @property
    def opening_s(self) -> float:
        """Time since the first attempt while none has succeeded, in s; infinite after a refusal."""
        return float("inf") if self._failure is None else self._now_s() - self._failing_since_s

    @property
    def _is_outdated(self) -> bool:
        """True if nobody has wanted a producer for a while since the last failure."""
        return not self._working and self._now_s() > self._retry_at_s + STALL_S

    def take_refusal(self) -> str | None:
        """Return the reason of a refusal since the last call, or why no opening succeeds."""
        is_news, self._is_news = self._is_news, False
        return (self._refusal if is_news else None) or self.hopeless

    @property
    def pause_reason(self) -> str | None:
        """The reason why the topic takes nothing until it is time for the next opening, or None."""
        if self._working or self._now_s() >= self._retry_at_s:
            return None
        return self._refusal or self.hopeless

    def open(self) -> None:
        """Open a producer, unless this goes on already or it is too early: call it again then."""
        # Each opening takes a thread and a connection, and all targets may have messages at once.
        if self._working or self._ended or self._now_s() < self._retry_at_s or is_crowded():
            return
        outdated = self._is_outdated
        self._working = True
        if self._failure is None or outdated:
            self._failure = _SLOW
            self._failing_since_s = self._now_s()
        self._start(self._open)

    def close(self, opened: Opened) -> None:
        """Close a producer; another one is opened only afterwards, as it may have the same name."""
        self._working = True

        def close() -> None:
            close_quietly(opened.producer, "producer")
            self._report(self._end_closing)

        self._start(close)

    def end(self) -> None:
        """Open no more; close a producer that is being opened."""
        with self._lock:
            self._ended = True

    def _open(self) -> None:
        opened: Opened | OpeningError
        try:
            opened = self._open_producer()
        except Exception as error:
            opened = OpeningError.of(error)
        # Whoever ends it after this report finds it, and closes the producer.
        with self._lock:
            if not self._ended:
                self._report(partial(self._take, opened))
                return
        if isinstance(opened, Opened):
            close_quietly(opened.producer, "producer")

    def _take(self, opened: Opened | OpeningError) -> None:
        self._working = False
        if isinstance(opened, Opened) and self._ended:
            self.close(opened)
            return
        if isinstance(opened, Opened):
            self._failure = self._refusal = None
            self._retry_s = _RETRY_S
        else:
            unavailable = opened.kind is Refusal.UNAVAILABLE
            self._is_news = not unavailable
            if unavailable:
                self._failure, self._refusal = opened.reason, None
            else:
                self._failure, self._refusal = None, opened.reason
            self._retry_at_s = self._now_s() + self._retry_s
            refused = opened.kind is Refusal.REFUSED
            longest_s = _LONGEST_PAUSE_S if refused else _LONGEST_RETRY_S
            self._retry_s = min(2 * self._retry_s, longest_s)
        self._opened(opened)

    def _end_closing(self) -> None:
        self._working = False
