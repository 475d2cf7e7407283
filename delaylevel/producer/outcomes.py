"""Outcomes of cancellations, as the dispatchers publish them to the outcomes topic."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pulsar

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import PartitionReader, read_range
from delaylevel.errors import EnvelopeError, LevelTopicError, NotFoundError
from delaylevel.model.message import text_of
from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt, no_outcomes
from delaylevel.model.position import EARLIEST
from delaylevel.model.topic_name import TopicName

from .client_calls import in_client

log = logging.getLogger(__name__)

# Wait for a record, in ms. The client does not notice Ctrl-C or a close meanwhile.
_POLL_MS = 100
# Time without a wait after which the reader is closed, in s.
_IDLE_S = 10.0
# A close of the reader takes milliseconds, unless the broker is away.
_CLOSE_S = 2.0
# ID, target and key of a message identify it.
_Key = tuple[str, str, str]


class OutcomeWatch:
    """A shared reader of one outcomes topic, for the calls that wait for outcomes.

    The reader and its thread exist only while there are such calls, and for some seconds after the
    last one. It starts at the end of the topic, at a position: a reader that starts at the symbolic
    end starts there again when its connection breaks, and loses what was published meanwhile.

    A client without the C++ core, such as the in-memory one, has nothing to wait for. Then there is
    no thread, and a wait reads what is there.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the admin interface.
        partition: the partition of the outcomes topic.
        threaded: False for a client that has nothing to wait for.
        idle_s: time without a wait after which the reader is closed, in s.

    Attributes:
        threaded: as given.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        partition: TopicName,
        *,
        threaded: bool = True,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._client = client
        self._admin = admin
        self._partition = partition
        self.threaded = threaded
        self._idle_s = idle_s
        # Held while the reader is opened, so that a second one is not opened.
        self._opening = threading.Lock()
        # Guards everything below.
        self._lock = threading.Lock()
        self._waits: dict[_Key, list[Wait]] = defaultdict(list)
        self._reader: PartitionReader | None = None
        self._thread: threading.Thread | None = None
        self._used_s = 0.0
        self._closed = False

    def expect(self, wait: Wait) -> None:
        """Begin to wait for an outcome that is published from now on.

        Without the outcomes topic, the wait ends at once, with the reason.

        Raises:
            pulsar.PulsarException: the outcomes topic cannot be read.
            BrokerError: the admin interface refused.
        """
        try:
            last = self._admin.last_message_id(self._partition)
        except NotFoundError:
            wait.reason = no_outcomes(self._partition)
            wait.end(None)
            return
        if last is not None:
            wait.after = (last.ledger, last.entry)
        with self._opening:
            if self._added(wait, None):
                return
            start = EARLIEST if last is None else last.next_entry
            reader = PartitionReader(self._client, self._partition.full, start)
            if not self._added(wait, reader):
                reader.close()

    def _added(self, wait: Wait, opened: PartitionReader | None) -> bool:
        """Add a wait if there is a reader; return False if a reader must be opened, or closed."""
        with self._lock:
            if self._closed:
                wait.end(None)
                return opened is None
            if self._reader is None:
                if opened is None:
                    return False
                self._reader, self._used_s = opened, time.monotonic()
                if self.threaded:
                    self._start(opened)
            if not wait.forgotten:
                self._waits[wait.key].append(wait)
            return True

    def forget(self, wait: Wait) -> None:
        """End a wait; one that has ended is no error."""
        with self._lock:
            self._used_s = time.monotonic()
            wait.forgotten = True
            waits = self._waits.get(wait.key, [])
            if wait in waits:
                waits.remove(wait)
            if not waits:
                self._waits.pop(wait.key, None)

    def read_available(self) -> None:
        """Read what is there, if no thread does."""
        reader = self._reader
        if not self.threaded and reader is not None:
            while (message := reader.receive(0)) is not None:
                self._take(message)

    def close(self) -> None:
        """Close the reader; waits end without an outcome."""
        with self._lock:
            self._closed = True
            thread, reader = self._thread, self._reader
        if thread is not None:
            thread.join(_CLOSE_S)
        elif reader is not None:
            self._end(reader)

    def _start(self, reader: PartitionReader) -> None:
        # A thread that is inside the client while Python exits aborts the process: see `in_client`.
        self._thread = threading.Thread(
            target=self._run, args=(reader,), name="delaylevel-outcomes", daemon=True
        )
        self._thread.start()

    def _run(self, reader: PartitionReader) -> None:
        try:
            while not self._finished():
                with in_client:
                    message = reader.receive(_POLL_MS)
                if message is not None:
                    self._take(message)
        except pulsar.AlreadyClosed:
            pass  # the application has closed its client: the waits end without an outcome
        except pulsar.PulsarException as error:
            if not self._closed:
                log.warning("%s cannot be read any more: %s", self._partition, error)
        finally:
            self._end(reader)

    def _finished(self) -> bool:
        """Return True if the reader is not needed; from then on, it does not count as open."""
        with self._lock:
            idle = not self._waits and time.monotonic() - self._used_s > self._idle_s
            if self._closed or idle:
                self._reader = self._thread = None
                return True
            return False

    def _end(self, reader: PartitionReader) -> None:
        with self._lock:
            if self._reader is reader:
                self._reader = self._thread = None
            if self._reader is None:
                waits = [wait for each in self._waits.values() for wait in each]
                self._waits.clear()
            else:
                waits = []  # those of the next reader
        for wait in waits:
            wait.end(None)
        # The client may be closed already.
        with in_client, contextlib.suppress(pulsar.PulsarException):
            reader.close()

    def _take(self, message: Any) -> None:
        """Give a record to those who wait for it."""
        # Most records are for others; their key tells.
        own_id = text_of(message.partition_key)
        with self._lock:
            if not any(key[0] == own_id for key in self._waits):
                return
        outcome = _outcome_of(message.properties())
        if outcome is None:
            return
        with self._lock:
            waits = list(self._waits.get((outcome.id, outcome.target, outcome.key), ()))
        stored = message.message_id()
        at = (stored.ledger_id(), stored.entry_id())
        for wait in waits:
            if wait.due_ms == outcome.due_ms and wait.after < at:
                wait.end(outcome)


class Wait:
    """One call that waits for an outcome.

    Args:
        watch: the watch that it belongs to.
        receipt: that of the message.

    Attributes:
        future: the outcome; None if the watch was closed.
        after: ledger and entry of the last record before the wait, which is not for it.
        forgotten: True once nobody waits.
        reason: why no outcome can come; empty if one can.
    """

    def __init__(self, watch: OutcomeWatch, receipt: Receipt) -> None:
        self.key: _Key = receipt.id, receipt.target, receipt.key
        self.due_ms = receipt.due_ms
        self.future: Future[Outcome | None] = Future()
        self.after = (EARLIEST.ledger, EARLIEST.entry)
        self.forgotten = False
        self.reason = ""
        self._watch = watch

    def begin(self) -> None:
        """Begin to wait, before the cancellation is sent; see :meth:`OutcomeWatch.expect`."""
        self._watch.expect(self)

    def result(self, timeout_s: float) -> Outcome | None:
        """Return the outcome; None if it does not come in time."""
        self._watch.read_available()
        if not self._watch.threaded:
            timeout_s = 0.0
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError:
            return None

    def end(self, outcome: Outcome | None) -> None:
        """Give the outcome to the call; the first one counts."""
        if not self.future.done():
            self.future.set_result(outcome)

    def forget(self) -> None:
        """End the wait."""
        self._watch.forget(self)


def stored_outcome(
    client: Any, admin: TopicAdmin, partition: TopicName, receipt: Receipt
) -> Outcome | None:
    """Return the outcome that the outcomes topic holds; None if it holds none.

    The last one counts. A later cancellation with a wrong key or due time ends as unknown, which
    says nothing about the message if another outcome does.

    Args:
        client: a ``pulsar.Client``.
        admin: the admin interface.
        partition: the partition of the outcomes topic.
        receipt: that of the message.

    Raises:
        LevelTopicError: the outcomes topic does not exist.
    """
    try:
        last = admin.last_message_id(partition)
    except NotFoundError as error:
        raise LevelTopicError(no_outcomes(partition)) from error
    if last is None:
        return None
    return last_outcome(
        (
            message.properties
            for message in read_range(client, partition.full, EARLIEST, last.next_entry)
            if message.key == receipt.id
        ),
        receipt,
    )


def last_outcome(records: Iterable[Mapping[str, str]], receipt: Receipt) -> Outcome | None:
    """Return the outcome that counts among the properties of records, oldest first."""
    found: Outcome | None = None
    wanted = receipt.id, receipt.target, receipt.key
    for properties in records:
        outcome = _outcome_of(properties)
        if outcome is None or (outcome.id, outcome.target, outcome.key) != wanted:
            continue
        says_nothing = outcome.status is OutcomeStatus.UNKNOWN
        if found is None or found.status is OutcomeStatus.UNKNOWN or not says_nothing:
            found = outcome
    return found


def _outcome_of(properties: Mapping[str, str]) -> Outcome | None:
    """Return the outcome in the properties of a record; None if it is not one."""
    try:
        return Outcome.read(properties)
    except EnvelopeError as error:
        log.warning("a record in an outcomes topic is ignored: %s", error)
        return None
