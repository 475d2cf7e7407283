"""Level topics without business topics, and member topics that a deletion left behind."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import NotFoundError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import MEMBER_PROPERTY, LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .deletion import PendingEntries, pending_entries
from .members import metadata_of
from .registry import list_level_topics
from .stats import pending_entries_in

_THREADS = 8
# Time in which the first message may create the business topic of a new level topic.
_NEW_MS = 600_000


@dataclass(frozen=True)
class Orphan:
    """A level topic with a business topic that is missing, or a member topic left behind.

    Attributes:
        topic: the level topic, or the member topic whose level topic is missing.
        description: the level topic's description; None for a member topic.
        missing: the targets that do not exist.
        pending: the entries that it still holds.
        level_topic: the level topic that the member topic belonged to; None for a level topic.
    """

    topic: str
    description: LevelTopicDescription | None
    missing: tuple[str, ...]
    pending: PendingEntries
    level_topic: str | None = None

    @property
    def entirely(self) -> bool:
        """True if none of its business topics exists."""
        return self.description is None or set(self.missing) == set(self.description.targets)


def orphans(admin: TopicAdmin, namespace: str) -> list[Orphan]:
    """Return the orphans of a namespace, sorted by name.

    A level topic that was created less than ten minutes ago and has had no message is none: its
    business topic may not exist yet.

    Args:
        namespace: ``tenant/namespace`` of the level topics; business topics may be elsewhere.

    Raises:
        NotFoundError: the namespace does not exist.
    """
    found = []
    for item in list_level_topics(admin, namespace):
        if item.description is None:
            continue
        targets = item.description.targets
        missing = tuple(name for name in targets if not admin.topic_exists(TopicName.parse(name)))
        if missing:
            pending = pending_entries(admin, item.description)
            if not pending.total and _is_new(admin, item.description):
                continue
            found.append(Orphan(item.topic, item.description, missing, pending))
    return sorted([*found, *_strays(admin, namespace)], key=lambda orphan: orphan.topic)


def _is_new(admin: TopicAdmin, description: LevelTopicDescription) -> bool:
    """Return True if a level topic was just created, and nothing was ever stored in it.

    Its ledgers tell that; but a broker also opens a ledger when it opens a partition again.
    """
    after_ms = SystemClock().now_ms() - _NEW_MS
    try:
        for member in description.members():
            for index in range(member.partitions):
                ledgers = admin.ledgers(member.topic.partition(index))
                if len(ledgers) != 1 or ledgers[0].entries:
                    return False
                if (ledgers[0].opened_ms or 0) < after_ms:
                    return False
    except NotFoundError:
        return False
    return True


def _strays(admin: TopicAdmin, namespace: str) -> Iterable[Orphan]:
    """Yield member topics whose level topic does not exist."""
    names = admin.list_partitioned_topics(namespace)
    full = {name.full for name in names}
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda name: metadata_of(admin, name), names))
    for name, metadata in zip(names, found, strict=True):
        owner = metadata.properties.get(MEMBER_PROPERTY) if metadata is not None else None
        if owner is None or owner == name.full or owner in full:
            continue
        entries = sum(map(pending_entries_in, admin.partitioned_stats(name).values()))
        yield Orphan(name.full, None, (), PendingEntries(parked=entries), owner)
