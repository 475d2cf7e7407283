"""What waits in the final window: where it stands, and what of that is still pending.

``WindowView`` is all that the rest of inspection knows of it, so that another source of the same
(a dispatcher that says what it holds) is one more class here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from delaylevel.description import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role
from delaylevel.errors import MissingExtraError, NotFoundError
from delaylevel.pending_ranges import PendingRange, Window
from delaylevel.ports import TopicAdmin
from delaylevel.positions import EARLIEST, Position
from delaylevel.reading import SourcePartition, read_range
from delaylevel.topicname import TopicName

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


class TrackerWindow:
    """With ``tracker``: the window topic behind its mark, without what the release log has.

    Args:
        client: a ``pulsar.Client``.
        admin: the cluster.
        description: the level topic.
        now_ms: the present.
        by_log: read the release log; otherwise what is due is taken for released, which is so
            while a dispatcher is at work.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        now_ms: int,
        by_log: bool,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._now_ms = now_ms
        self._by_log = by_log
        self._released: dict[int, Callable[[Sequence[Place]], list[bool]]] = {}

    def ranges(self, due: Window) -> list[PendingRange]:
        """Return what stands behind the mark of each partition, and can be due in a window."""
        since_ms = None
        if due.from_ms is not None:
            since_ms = due.from_ms - _longest_stay_ms(self._description)
            if since_ms > self._now_ms:
                return []
        found = []
        topic = self._description.window_topic
        for index in range(self._description.window_partitions):
            source = SourcePartition(
                self._description.topic, topic.partition(index).full, Role.WINDOW, -1, index, 0
            )
            if self._by_log:
                # Before the range is settled: what is released from now on is still shown, what
                # was released is not.
                self._released[index] = self._read_log(index)
            try:
                mark = self._admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
            except NotFoundError:
                mark = EARLIEST
            item = _since(self._admin, source, mark, since_ms)
            if item is not None:
                found.append(item)
        return found

    def waiting(
        self, source: SourcePartition, places: Sequence[Place], due_ms: Sequence[int | None]
    ) -> list[bool]:
        """Return which messages are not released."""
        if not self._by_log:
            return [due is not None and due > self._now_ms for due in due_ms]
        return [not one for one in self._released[source.partition](places)]

    def _read_log(self, index: int) -> Callable[[Sequence[Place]], list[bool]]:
        """Return what says which positions of a window partition are released."""
        try:
            import numpy as np

            from delaylevel.releaselog import ReleaseState, pack
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"the release log cannot be read without {error.name}: "
                "pip install 'delaylevel[window]'"
            ) from error
        log = self._description.log_topic.partition(index)
        try:
            last = self._admin.last_message_id(log)
            start = self._admin.mark_delete_position(log, SUBSCRIPTION).next_entry
        except NotFoundError:
            last, start = None, EARLIEST
        state = ReleaseState()
        if last is not None:
            records = read_range(self._client, log.full, start, last.next_entry)
            state = ReleaseState.read(record.value or b"" for record in records)

        def released(places: Sequence[Place]) -> list[bool]:
            columns = np.array(places, dtype=np.int64).reshape(-1, 3)
            entry_ids = columns[:, 1] << 10 | np.maximum(columns[:, 2], 0)
            found: list[bool] = state.is_released(pack(columns[:, 0], entry_ids)).tolist()
            return found

        return released


def window_view(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    now_ms: int,
    *,
    targets: Sequence[str] | None = None,
    by_log: bool = True,
) -> WindowView:
    """Return the view of a level topic's final window.

    Args:
        client: a ``pulsar.Client``.
        admin: the cluster.
        description: the level topic.
        now_ms: the present.
        targets: the business topics that are asked for; all of them by default.
        by_log: as for :class:`TrackerWindow`.
    """
    if description.final_window is FinalWindow.TRACKER:
        return TrackerWindow(client, admin, description, now_ms, by_log)
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
