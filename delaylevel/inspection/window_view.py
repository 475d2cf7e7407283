"""What waits in the final window: where it stands, and what of that is still pending.

``WindowView`` is all that the rest of inspection knows of it, so that another source of the same
(a dispatcher that says what it holds) is one more class here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import MissingExtraError, NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.scan import PendingRange, Window

_THREADS = 4
# Snapshots with very many ids are not read for an estimate.
_LOG_BYTES = 8 << 20
Place = tuple[int, int, int]  # ledger, entry, batch index


class WindowView(Protocol):
    """What waits in the final window of a level topic. May be used by several threads at once."""

    def ranges(self, due: Window) -> list[PendingRange]:
        """Return where the messages stand that are pending and due in a window.

        The ranges may hold others too.
        """
        ...

    def waiting(
        self, source: SourcePartition, places: Sequence[Place], due_ms: Sequence[int | None]
    ) -> list[bool]:
        """Return which messages of a partition are pending.

        Args:
            source: the partition.
            places: where they stand there.
            due_ms: when they are due; None where that is not known.
        """
        ...

    def known(self, source: SourcePartition) -> bool:
        """Return whether that is known of a partition of :meth:`ranges`, and not supposed."""
        ...


class BrokerWindow:
    """With ``broker``: messages of the business topics whose due time has not come.

    They were published when they were near-due, so that no more than that time is read back.

    Args:
        admin: the cluster.
        description: the level topic.
        targets: the business topics to look into.
        now_ms: the present.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        targets: Sequence[str],
        now_ms: int,
    ) -> None:
        self._admin = admin
        self._description = description
        self._targets = targets
        self._now_ms = now_ms

    def ranges(self, due: Window) -> list[PendingRange]:
        """Return where messages stand that can be due from now on, and in a window."""
        from_ms = max(self._now_ms, due.from_ms if due.from_ms is not None else self._now_ms)
        since_ms = from_ms - _longest_stay_ms(self._description)
        if since_ms > self._now_ms or (due.before_ms is not None and due.before_ms <= from_ms):
            return []
        found = []
        for target in self._targets:
            for index, partition in enumerate(_partitions(self._admin, TopicName.parse(target))):
                source = SourcePartition(
                    self._description.topic, partition.full, Role.WINDOW, -1, index, 0
                )
                item = _since(self._admin, source, EARLIEST, since_ms)
                if item is not None:
                    found.append(item)
        return found

    def waiting(
        self, source: SourcePartition, places: Sequence[Place], due_ms: Sequence[int | None]
    ) -> list[bool]:
        """Return which messages are due later than now."""
        return [due is not None and due > self._now_ms for due in due_ms]

    def known(self, source: SourcePartition) -> bool:
        """Return True: the broker delivers by the clock."""
        return True


class TrackerWindow:
    """With ``tracker``: the window topic behind its mark, without what the release log has.

    Where a log has more than ``most_log_records``, what was due when its last one was written is
    taken for released: dispatchers release in due order. Where logs cannot be read without an
    extra that is not installed, what is due now is.

    Args:
        client: a ``pulsar.Client``.
        admin: the cluster.
        description: the level topic.
        now_ms: the present.
        most_log_records: how many records of a partition's release log are read at the most;
            None for all of them, whatever it takes.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        now_ms: int,
        most_log_records: int | None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._now_ms = now_ms
        self._most_log_records = most_log_records
        self._released: dict[int, Callable[[Sequence[Place]], list[bool]]] = {}
        self._until_ms: dict[int, int] = {}

    def ranges(self, due: Window) -> list[PendingRange]:
        """Return what stands behind the mark of each partition, and can be due in a window."""
        since_ms = None
        if due.from_ms is not None:
            since_ms = due.from_ms - _longest_stay_ms(self._description)
            if since_ms > self._now_ms:
                return []
        count = self._description.window_partitions
        with ThreadPoolExecutor(min(_THREADS, count), "delaylevel-window") as pool:
            # Logs before ranges: what is released from now on is still shown, what was released
            # is not.
            list(pool.map(self._read_log, range(count)))
            found = list(pool.map(lambda index: self._range(index, since_ms), range(count)))
        return [item for item in found if item is not None]

    def waiting(
        self, source: SourcePartition, places: Sequence[Place], due_ms: Sequence[int | None]
    ) -> list[bool]:
        """Return which messages are not released."""
        released = self._released.get(source.partition)
        if released is None:
            until_ms = self._until_ms[source.partition]
            return [due is not None and due > until_ms for due in due_ms]
        return [not one for one in released(places)]

    def known(self, source: SourcePartition) -> bool:
        """Return whether the release log says what is pending, and not the clock."""
        return source.partition in self._released

    def _range(self, index: int, since_ms: int | None) -> PendingRange | None:
        name = self._description.window_topic.partition(index)
        source = SourcePartition(self._description.topic, name.full, Role.WINDOW, -1, index, 0)
        try:
            mark = self._admin.mark_delete_position(name, SUBSCRIPTION).next_entry
        except NotFoundError:
            mark = EARLIEST
        return _since(self._admin, source, mark, since_ms)

    def _read_log(self, index: int) -> None:
        """Find out which positions of a window partition are released, or until when."""
        most = self._most_log_records
        try:
            from .released import LogLimit, LongLogError, last_written_ms, released_by_log
        except ModuleNotFoundError as error:
            if most is not None:
                self._until_ms[index] = self._now_ms
                return
            raise MissingExtraError(
                f"the release log cannot be read without {error.name}: "
                "pip install 'delaylevel[window]'"
            ) from error
        log = self._description.journal_topic.partition(index)
        limit = None if most is None else LogLimit(most, _LOG_BYTES)
        try:
            self._released[index] = released_by_log(self._client, self._admin, log, limit)
        except LongLogError:
            written_ms = last_written_ms(self._client, self._admin, log)
            self._until_ms[index] = min(written_ms, self._now_ms)


def window_view(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    now_ms: int,
    *,
    targets: Sequence[str] | None = None,
    most_log_records: int | None = None,
) -> WindowView:
    """Return the view of a level topic's final window.

    Args:
        client: a ``pulsar.Client``.
        admin: the cluster.
        description: the level topic.
        now_ms: the present.
        targets: the business topics that are asked for; all of them by default.
        most_log_records: as for :class:`TrackerWindow`.
    """
    if description.final_window is FinalWindow.TRACKER:
        return TrackerWindow(client, admin, description, now_ms, most_log_records)
    return BrokerWindow(
        admin, description, description.targets if targets is None else targets, now_ms
    )


def _longest_stay_ms(description: LevelTopicDescription) -> int:
    """Return how long before its due time a message can have been published into the window.

    By a producer whose clock is off by less than the lead.
    """
    finest = description.levels[len(description.levels) - 1]
    return finest.near_due_ms + finest.lead_ms


def _partitions(admin: TopicAdmin, topic: TopicName) -> list[TopicName]:
    try:
        count = admin.partitioned_metadata(topic).partitions
    except NotFoundError:
        return []
    return [topic.partition(index) for index in range(count)] if count else [topic]


def _since(
    admin: TopicAdmin, source: SourcePartition, start: Position, since_ms: int | None
) -> PendingRange | None:
    """Return what a partition has from a position on, published since a time; None for nothing."""
    try:
        last = admin.last_message_id(source.name)
        if last is None or last.entry < 0:
            return None
        if since_ms is not None:
            first = admin.message_id_at(source.name, since_ms)
            if first is None:
                return None
            start = max(start, first.entry_start)
    except NotFoundError:
        return None  # a target that was deleted
    end = last.next_entry
    return PendingRange(source, start, end) if start < end else None
