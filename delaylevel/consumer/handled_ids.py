"""The IDs of handled messages: in memory, and in a topic that processes share.

Once an ID is saved, no message with this ID is handled again, as long as it is one of the last
capacity/2 saved ones. Only successful handlings are saved, so a retry is never mistaken for a copy.

Not in the module of the option: this one needs NumPy, which an application without deduplication
does not install.

The topic is a log, with the durable subscription ``delaylevel``. A record is a message with up to
100,000 IDs of 8 bytes; the union of all records is the stored state, so a record that is stored
twice changes nothing. Every process appends its own IDs, those that come while a record is not
confirmed yet together in the next one, and reads those of the others.

When the records are many for the IDs that they hold, a process appends everything that it
remembers, and acknowledges the log up to the place that it had read before. What others appended
after that place stays. The broker deletes what is acknowledged. Compaction is not needed, and does
no harm.
"""

from __future__ import annotations

import atexit
import logging
import operator
import struct
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import pulsar

from delaylevel.cluster.client_parts.cores import has_core
from delaylevel.cluster.failures import close_quietly, error_name, translate_errors
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.publisher import UNLIMITED_SETTINGS, open_producer
from delaylevel.cluster.reader import PartitionReader
from delaylevel.cluster.rules import OURS
from delaylevel.cluster.threads import GrowingPause, in_thread
from delaylevel.errors import (
    AdminError,
    BrokerError,
    ClientError,
    ConflictError,
    InvalidInputError,
    LevelTopicError,
)
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client_calls import in_client
from delaylevel.structures.deduplicator import Deduplicator
from delaylevel.structures.id_set import Ids
from delaylevel.topics.members import apply_policies

from .listener import Deduplication
from .retry import Verdict

log = logging.getLogger(__name__)

_KEY = "handled"
_FLUSH_S = 30.0
_POSITIVE = (1 << 63) - 1


def key_of(value: object) -> int:
    """Return the number in [0, 2**63) that stands for an ID: itself, or a hash."""
    if isinstance(value, str) and value:
        digest = blake2b(str.encode(value, "utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest(), "little") & _POSITIVE
    try:
        number = operator.index(value)  # type: ignore[arg-type]
        packed = struct.pack("<q", number)
    except (TypeError, struct.error):
        packed = None
    if packed is None or isinstance(value, bool):
        raise InvalidInputError(
            f"the ID for deduplication was {value!r}: it must be a text that is not empty, or an "
            "integer of 64 bits"
        )
    if number >= 0:
        return number
    # Another hash than that of a text with the same bytes.
    digest = blake2b(packed, digest_size=8, person=b"integer")
    return int.from_bytes(digest.digest(), "little") & _POSITIVE


class HandledIds:
    """Handled IDs of one subscription; any number of threads and coroutines may use it.

    For each message: `begin`; if that says so, the handler; then `save` before the acknowledgement,
    or `release` if the message was not handled with success.
    """

    def __init__(self, options: Deduplication) -> None:
        self._by = options.by
        self._lock = threading.Lock()
        self._handled = Deduplicator(options.capacity)
        self._in_progress: set[int] = set()
        # By identity of a message that was begun. The function for IDs is called only once: its
        # answer may be different after the handler has changed the message.
        self._keys: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of remembered IDs."""
        return len(self._handled)

    def begin(self, message: Any) -> Verdict:
        """Claim the ID of a message, unless it was handled or another message has the claim."""
        key = key_of(message.identity if self._by is None else self._by(message))
        with self._lock:
            if key in self._in_progress:
                # A caller that waits must have no other claim: two could wait for each other.
                return Verdict.WAIT
            if self._handled.is_duplicate(key, _KEY):
                return Verdict.DUPLICATE
            self._in_progress.add(key)
            self._keys[id(message)] = key
        return Verdict.HANDLE

    def save(self, message: Any, saved: Callable[[], object]) -> None:
        """Save the ID of a message that was handled, then call ``saved`` in any thread."""
        key = self._keys.pop(id(message))
        with self._lock:
            self._handled.save(key, _KEY)
            self._in_progress.discard(key)
        self._store(key, saved)

    def _store(self, key: int, saved: Callable[[], object]) -> None:
        saved()

    def release(self, message: Any) -> None:
        """End the claim on the ID of a message that was not handled with success, if it has one."""
        key = self._keys.pop(id(message), None)
        if key is not None:
            with self._lock:
                self._in_progress.discard(key)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the store has every ID; return False if it does not within the time, in s."""
        return True

    def close(self) -> None:
        """Flush and close the store; log it if IDs are lost."""


SUFFIX = "handled"
#: Properties of a record: the listener that the IDs belong to, and the process that wrote it.
LISTENER = "delaylevel-handled-by"
WRITER = "delaylevel-writer"
_MARK = b"DLIDS1\0\0"
_MOST_IDS = 100_000
# Records after which the log is rewritten, if these hold few IDs each.
_MOST_RECORDS = 10_000
_IDS_PER_RECORD = 100
_READ_MS = 30_000
_POLL_MS = 200
_LONGEST_PAUSE_S = 30.0


class TopicIds(HandledIds):
    """Handled IDs in a log of one listener; a process writes and reads it in a thread each."""

    def __init__(
        self,
        options: Deduplication,
        client: Any,
        topic: str,
        subscription: str,
    ) -> None:
        super().__init__(options)
        assert options.store is not None
        self._client = client
        business = TopicName.parse(topic).without_partition.full
        self._properties = {LISTENER: f"{business}~{subscription}", WRITER: uuid.uuid4().hex}
        # A record is a batch already.
        self._settings = {**UNLIMITED_SETTINGS, "batching_enabled": False}
        self._settings["send_timeout_millis"] = int(options.store.timeout_s * 1000)
        self._changed = threading.Condition()
        # The IDs of the next record, each with the function that it calls when it is saved; and
        # the number of those in the record that is being sent.
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self._sending = 0
        self._capacity = options.capacity
        self._pause, self._retry_s = GrowingPause(), 0.0
        self._stopped = False
        # A client in memory does not wait: IDs are stored in the thread of the handler.
        self._threaded = has_core(client)
        self._threads: list[threading.Thread] = []
        # Where the log was read up to, and the number of records since it was rewritten.
        self._read = EARLIEST
        self._records = 0
        with translate_errors():
            name = TopicName.parse(f"{business}-{subscription}-{SUFFIX}")
            self._topic = _prepare(client, name)
            # The broker keeps what a durable subscription has not acknowledged. Every process may
            # acknowledge on a Failover subscription.
            self._consumer = client.subscribe(
                self._topic,
                SUBSCRIPTION,
                consumer_type=pulsar.ConsumerType.Failover,
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=0,  # it acknowledges what a reader has read
            )
        self._producer: Any = None
        self._warning = RepeatedWarning(log, f"handled IDs in {self._topic}")
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        """Open the log, add all stored IDs to the memory, then write and follow the log."""
        with translate_errors():
            self._producer = open_producer(self._client, self._topic, self._settings)
            reader = PartitionReader(self._client, self._topic, EARLIEST)
            try:
                while reader.has_message_available():
                    message = reader.receive(_READ_MS)
                    if message is None:
                        raise BrokerError(
                            f"{self._topic} delivered nothing within {_READ_MS // 1000} s although "
                            "it has more handled IDs: is the broker overloaded?"
                        )
                    self._take(message, check=True)
            finally:
                reader.close()
        if self._has_many_records():
            self._rewrite()
        atexit.register(self._stop)
        for work in (self._follow, self._write) if self._threaded else (self._follow,):
            self._threads.append(in_thread(work))

    def _store(self, key: int, saved: Callable[[], object]) -> None:
        # If the topic refuses the ID or does not answer, the message was handled all the same, and
        # would certainly be handled again if it stayed unacknowledged. So `saved` is called, the
        # failure is logged, and the ID is sent again after a pause.
        with self._changed:
            # The topic refused a moment ago, and no handler is to wait for its next answer.
            refused = self._stopped or time.monotonic() < self._retry_s
            self._waiting.append((key, _nothing if refused else saved))
            self._changed.notify_all()
        if refused:
            saved()
        if not self._threaded:
            self._store_all()

    def flush(self, timeout_s: float) -> bool:
        with self._changed:
            self._retry_s = 0.0
            self._changed.notify_all()
        if not self._threaded:
            self._store_all()
            timeout_s = 0.0
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self.unsaved, timeout_s)
            return not self.unsaved

    def close(self) -> None:
        if not self.flush(_FLUSH_S):
            log.error(
                "%d IDs of handled messages could not be stored, and are forgotten at the end of "
                "this process: copies of these messages would be handled again",
                self.unsaved,
            )
        self._end()

    def _end(self) -> None:
        """Close the producer, the reader and the consumer."""
        self._stop()
        producer = self._producer
        if producer is not None:
            close_quietly(producer, "producer")  # what is being sent fails
        for thread in self._threads:
            thread.join(_LONGEST_PAUSE_S)
        atexit.unregister(self._stop)
        close_quietly(self._consumer, "consumer")

    @property
    def unsaved(self) -> int:
        """Number of handled IDs that the topic does not have yet."""
        return len(self._waiting) + self._sending

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # -- writing

    def _write(self) -> None:
        """Store IDs as they come, and refused ones after a pause, until this log is closed."""
        while True:
            with self._changed:
                if self._stopped:
                    return
                pause_s = max(0.0, self._retry_s - time.monotonic())
                if pause_s or not self._waiting:
                    self._changed.wait(pause_s or None)
                    continue
            self._store_all()

    def _store_all(self) -> None:
        """Store one record with the IDs that wait, and call their functions."""
        with self._changed:
            sent, self._waiting = self._waiting[:_MOST_IDS], self._waiting[_MOST_IDS:]
            self._sending = len(sent)
        if not sent:
            return
        failure: Exception | None = None
        try:
            if self._producer is None and not self._stopped:
                self._producer = open_producer(self._client, self._topic, self._settings)
            with in_client:
                self._producer.send(_encode([key for key, _ in sent]), properties=self._properties)
        except Exception as error:
            failure = error
            if isinstance(error, ClientError) and error.name == "AlreadyClosed":
                self._stop()  # no producer can be opened: the client was closed, this log was not
            # After most failures a producer never sends again.
            producer, self._producer = self._producer, None
            if producer is not None:
                close_quietly(producer, "producer")
        with self._changed:
            if failure is None:
                self._pause.reset()
                self._retry_s = 0.0
            else:
                # It may be stored or not, so these IDs are sent again. Their messages do not wait
                # for that: unacknowledged, they would certainly be handled again.
                sent += self._waiting
                self._waiting = [(key, _nothing) for key, _ in sent[-self._capacity :]]
                self._sending = 0
                self._retry_s = time.monotonic() + self._pause.next_s()
        if failure is None:
            self._warning.over()
        else:
            self._warning.failed(
                f"{error_name(failure)}: IDs of handled messages are not confirmed, and kept in "
                "memory only; copies of these messages may be handled again after a restart"
            )
        for _, saved in sent:
            try:
                saved()
            except Exception as error:
                # Its consumer was lost. The broker delivers the message again.
                log.debug("%s: acknowledging: %s", self._topic, error_name(error))
        with self._changed:  # a flush ends after these calls
            self._sending = 0
            self._changed.notify_all()

    # -- reading

    def _follow(self) -> None:
        """Read the records of other processes, until this log is closed."""
        pause = GrowingPause()
        while not self._stopped:
            try:
                try:
                    reader = PartitionReader(self._client, self._topic, self._read)
                except pulsar.AlreadyClosed:
                    return  # the client was closed, and this log was not
                try:
                    while not self._stopped:
                        message = reader.receive(_POLL_MS)
                        if message is None:
                            with self._changed:  # a reader in memory does not wait
                                self._changed.wait(0.05)
                            continue
                        self._take(message)
                        pause.reset()
                        if self._has_many_records():
                            self._rewrite()
                finally:
                    close_quietly(reader, "reader")
            except Exception as error:
                self._warning.failed(f"the IDs of other processes cannot be read: {error}")
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause.next_s())

    def _take(self, message: Any, check: bool = False) -> None:
        """Add the IDs of a record to the memory, unless they come from this process."""
        at = message.message_id()
        properties = message.properties()
        owner = properties.get(LISTENER)
        if check and owner != self._properties[LISTENER]:
            raise InvalidInputError(
                f"{self._topic} holds {f'the handled IDs of {owner}' if owner else 'messages'}: "
                "give one of them another subscription"
            )
        # Its own IDs were saved before. Those beyond the capacity by now must not come back.
        mine = self._properties.items() <= properties.items()
        if owner == self._properties[LISTENER] and not mine:
            try:
                self._add(decode_ids(message.data()))
            except ValueError as error:
                log.warning("%s: a record was skipped: %s", self._topic, error)
        self._read = Position(at.ledger_id(), at.entry_id(), at.batch_index()).next
        self._records += 1

    def _add(self, ids: Ids) -> None:
        with self._lock:
            # Saved once more, a known ID would take the place of an older one.
            if len(self._handled):
                ids = ids[~self._handled.are_duplicates(ids, _KEY)]
            self._handled.save_all(ids, _KEY)

    # -- rewriting

    def _has_many_records(self) -> bool:
        return self._records > max(_MOST_RECORDS, len(self) // _IDS_PER_RECORD)

    def _rewrite(self) -> None:
        """Append everything that is remembered; once that is stored, acknowledge what was read."""
        read, producer = self._read, self._producer  # another thread may replace the producer
        if producer is None:
            return  # the topic refuses records: later
        with self._lock:
            ids = self._handled.ids(_KEY).astype(np.uint64)  # the older generation first
        with translate_errors():
            for start in range(0, ids.size, _MOST_IDS):
                producer.send(_encode(ids[start : start + _MOST_IDS]), properties=self._properties)
            self._records = 0
            if read.entry > 0:
                self._consumer.acknowledge_cumulative(
                    pulsar.MessageId(-1, read.ledger, read.entry - 1, -1)
                )


def open_ids(options: Deduplication, client: Any, topic: str, subscription: str) -> HandledIds:
    """Open the handled IDs of a subscription of a business topic, and load the stored ones."""
    if options.store is None:
        return HandledIds(options)
    return TopicIds(options, client, topic, subscription)


def _nothing() -> None:
    pass


def _encode(ids: Any) -> bytes:
    return _MARK + np.asarray(ids, dtype="<u8").tobytes()


def decode_ids(data: bytes) -> Ids:
    """Return the IDs of a record."""
    if not data.startswith(_MARK) or len(data) % 8:
        raise ValueError(f"its {len(data)} bytes are not a record of IDs")
    return np.frombuffer(data, dtype="<u8", offset=len(_MARK)).astype(np.uint64)


def _prepare(client: Any, topic: TopicName) -> str:
    """Create the topic if the client may, and return the name of its first partition."""
    admin = getattr(client, "admin", None)
    if admin is not None:
        for step in (
            partial(admin.create_partitioned, topic, 1),
            partial(admin.create_subscription, topic, SUBSCRIPTION, earliest=True),
            partial(apply_policies, admin, topic, OURS),
        ):
            try:
                step()
            except ConflictError:
                pass
            except AdminError as error:
                log.info("%s stays as it is: %s", topic, error)
            except LevelTopicError as error:
                log.warning("policies of the namespace may expire IDs: %s", error)
    partitions: list[str] = client.get_topic_partitions(topic.full)
    return partitions[0]
