"""Immediate hand-off of everything that is pending to the final window: a drain."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_unacknowledged
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import BatchTooLargeError, LevelTopicError
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import Position, SourcePartition, source_partitions
from delaylevel.model.router import DUE, WINDOW, Decision, Router
from delaylevel.topics.registry import describe
from delaylevel.topics.roster import DescriptionCache
from delaylevel.topics.targets import early_subscriptions

from .forwarder import Forwarder
from .ready import readable_end

# A limit, because producers may never stop sending.
_PASSES = 20


class _NoLevels(Router):
    """Router that skips the levels, however long the delay."""

    def decide(self, due_ms: int, now_ms: int, came_from: int | None = None) -> Decision:
        """Return DUE or WINDOW."""
        return DUE if due_ms <= now_ms else WINDOW


def drain(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    *,
    clock: Clock | None = None,
    allow_early: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    target_client: Callable[[], Any] | None = None,
) -> ForwardReport:
    """Hand off everything that is pending in the levels, whatever its due time, and acknowledge it.

    With ``broker``, a message goes to its business topic, which holds it until it is due; with
    ``tracker``, it goes to the window topic. Due messages are delivered. Stop the mover first, and
    preferably the producers: some passes also drain what they park meanwhile. An interrupted drain
    loses nothing and can be started again; then some messages arrive twice, with the same id.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        clock: clock that decides which messages are due.
        allow_early: True to continue although a subscription would get messages early.
        progress: function that is called with the number of messages after each partition.
        target_client: function that returns a new client of the same cluster, for connections to
            the targets; None to publish with ``client``.

    Returns:
        The outcomes. Held messages are left, because their targets cannot be written.

    Raises:
        AlreadyRunningError: a mover is running.
        LevelTopicError: a subscription ignores due times, or producers park too fast.
        BrokerError: a message was not confirmed; it stays in its level.
    """
    early = early_subscriptions(admin, description)
    if early and not allow_early:
        raise LevelTopicError(
            f"{', '.join(early)} would get now what is due later: only Shared and Key_Shared "
            "subscriptions honour the due time of a message. Nothing was drained; wait until the "
            "levels are empty, or allow it (--allow-early)"
        )
    total = ForwardReport()
    sources = source_partitions(description)
    router = _NoLevels(description.levels)
    descriptions = DescriptionCache(partial(describe, admin, description.topic), description)
    stored_s = time.monotonic()  # what is read next was stored before this time
    with (
        closing(PartitionLock(client, admin, sources, "drain")) as lock,
        closing(TargetClients(client, target_client)) as clients,
        closing(
            Forwarder(
                client,
                admin,
                description,
                SteadyClock(clock or SystemClock()),
                router=router,
                client_of=clients.of,
                refreshed=lambda: descriptions.refresh(stored_s),
            )
        ) as forwarder,
    ):
        at = dict(lock.start_positions(sources))
        # A message whose target is still missing returns to the held topic, so that is read once.
        held_ends = {
            source.topic: _end(admin, source) for source in sources if source.role is Role.HELD
        }
        for _ in range(_PASSES):
            moved = False
            for source in sources:
                end = held_ends.get(source.topic, _end(admin, source))
                if end is not None:
                    end = readable_end(admin, source, at[source.topic], end)
                if end is None or end <= at[source.topic]:
                    continue
                moved = True
                stored_s = time.monotonic()
                messages = read_unacknowledged(client, admin, source, at[source.topic], end)
                try:
                    forwarder.forward_all(source, messages)
                    total.add(forwarder.flush())
                    lock.acknowledge(source, end)
                except BatchTooLargeError:
                    continue  # they are read again in the next pass, and each is alone
                at[source.topic] = end
                progress(total.total)
            if not moved:
                break
        else:
            raise LevelTopicError(
                f"messages are parked in {description.topic} faster than they are drained, or as "
                "fast: stop its producers, and drain it again"
            )
    return total


def _end(admin: TopicAdmin, source: SourcePartition) -> Position | None:
    last = admin.last_message_id(source.name)
    return None if last is None else last.next_entry
