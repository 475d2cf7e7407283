"""Estimated distributions of due times, from sampled entries of each partition.

A reader is opened for each sampled entry.

The broker knows the number of entries and of bytes of a partition, but of its messages only those
that were published since it opened the partition. Entries have 1 to 1,024 messages, and a few
samples would say little about their mean. Messages differ less in size: the number of messages is
that of the bytes, without those of the entries themselves, divided by the mean size of a sampled
message. Compressed payloads have another size in the client, so for them the samples' mean number
of messages in an entry has to do.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from delaylevel.cluster.reader import EntryRange, choose_places
from delaylevel.cluster.threads import in_parallel
from delaylevel.model.delivery import LARGEST_BATCH
from delaylevel.model.envelope import COMPRESSION
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage, batch_size, parked_message
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.scan import PendingRange

from .horizon import Distribution
from .snapshot import PendingSnapshot, own_topic

# Number of sampled entries in all partitions together, and the largest number in one.
_ENTRIES = 110
_MOST_ENTRIES = 24
# Smallest number of messages in a sample: small entries are sampled together with the next ones.
_LEAST_MESSAGES = 16
_WINDOW_MESSAGES = 200
# Largest number of messages of one batch in a sample.
_MOST_MESSAGES = 48
# Bytes of an entry besides its messages: checksum, metadata, name of the producer.
_ENTRY_BYTES = 60
# Bytes of a message in an entry, besides its texts and its payload; and those of a property.
_MESSAGE_BYTES, _PROPERTY_BYTES = 10, 6
_EVENT_TIME_BYTES = 7
# Number of messages that are counted rather than sampled.
_COUNTED = 8_000


def sample(snapshot: PendingSnapshot) -> list[Distribution] | None:
    """Return the estimated distribution of each range; None if counting takes no longer."""
    samplers = _samplers(snapshot)
    if sum(sampler.most for sampler in samplers) <= _COUNTED:
        return None
    # The first sample of a range shows the size of its entries, and so which to sample next.
    in_parallel(lambda sampler: sampler.sample(0), samplers)
    most = max(1, min(_MOST_ENTRIES, _ENTRIES // len(samplers)))
    work = [(sampler, number) for sampler in samplers for number in sampler.further_entries(most)]
    in_parallel(lambda one: one[0].sample(one[1]), work)
    return [sampler.estimate() for sampler in samplers]


def _samplers(snapshot: PendingSnapshot) -> list[_RangeSampler]:
    admin, samplers = snapshot.admin, []
    names = [item.source.name for item in snapshot.ranges]
    topics = {name.without_partition for name in names if name.partition_index is not None}
    stats = dict(zip(topics, in_parallel(admin.partitioned_stats, topics), strict=True))

    def messages_in(name: TopicName) -> int:
        # A business topic may have no partitions, and a broker may leave some out.
        found = stats.get(name.without_partition, {}).get(name.partition_index or 0)
        return (found or admin.partition_stats(name)).messages_in

    # Messages before entries: a message that is published in between must not raise the mean.
    messages = in_parallel(messages_in, names)
    contents = in_parallel(admin.contents, names)
    for item, count, (ledgers, added) in zip(snapshot.ranges, messages, contents, strict=True):
        entries = EntryRange(ledgers, item.start, item.end)
        # The broker's counters begin when it opens a topic, and may not include all entries.
        per_entry = count / added if count and added and added >= len(entries) else None
        counted = per_entry is not None and added == len(entries)
        samplers.append(_RangeSampler(snapshot, item, entries, per_entry, counted))
    return samplers


@dataclass(frozen=True)
class _EntrySample:
    """The sampled messages of an entry, or of several small ones."""

    number: int
    publish_ms: int
    per_entry: float
    read: int
    size: float  # mean number of bytes of a message in its entry; 0 if that is unknown
    pending: list[ParkedMessage]
    cancelling: list[ParkedMessage]


@dataclass
class _RangeSampler:
    """Sampler of one range."""

    _snapshot: PendingSnapshot
    _item: PendingRange
    _entries: EntryRange
    _per_entry: float | None  # mean number of messages in an entry
    _counted: bool  # it is the mean of exactly these entries

    def __post_init__(self) -> None:
        self._in_window = self._item.source.role is Role.WINDOW
        self._least = _WINDOW_MESSAGES if self._in_window else _LEAST_MESSAGES
        # The number of entries in a sample is unknown before the first one. Prefetching too many
        # entries costs more than another request.
        self._queue = _WINDOW_MESSAGES // 4 if self._in_window else 1
        self._samples: list[_EntrySample] = []

    @property
    def most(self) -> float:
        """The number of messages, or more if it is unknown."""
        return len(self._entries) * (self._per_entry or LARGEST_BATCH)

    def further_entries(self, most: int) -> list[int]:
        """Return the numbers of further entries to sample, so that samples do not overlap."""
        room = max(1, len(self._entries) // max(1, 2 * self._queue))
        return [number for number in choose_places(len(self._entries), min(most, room)) if number]

    def sample(self, number: int) -> None:
        """Sample an entry, or several small ones; skip entries that no longer exist."""
        if number >= len(self._entries):
            return
        source = self._item.source
        found: list[ParkedMessage] = []
        size = 0
        stored = 0.0
        start = self._entries.position(number)
        with closing(self._snapshot.read(self._item, start, self._queue)) as messages:
            for one in messages:
                if not found:
                    size = max(1, batch_size(one[0].message_id()))
                message = parked_message(*one)
                stored += _stored_bytes(message)
                found.append(message._replace(value=None))  # it may be large
                if len(found) >= max(self._least, min(size, _MOST_MESSAGES)):
                    break
        if not found:
            return
        # Of the last entry, only a part may have been read.
        entries = len({(one.ledger, one.entry) for one in found})
        per_entry = float(size) if size > 1 else len(found) / entries
        self._queue = max(1, int(self._least / per_entry))
        compressed = any(COMPRESSION in one.properties for one in found)
        self._samples.append(
            _EntrySample(
                number,
                found[0].publish_ms,
                per_entry,
                len(found),
                0.0 if compressed else stored / len(found),
                self._snapshot.select(source, found),
                self._snapshot.cancelling(source, found),
            )
        )

    def estimate(self) -> Distribution:
        """Return the distribution in which each sample represents the entries up to the next."""
        samples = sorted(self._samples, key=lambda one: one.number)
        result = Distribution(own_topic(self._item.source))
        result.looked_at = sum(one.read for one in samples)
        if not samples:
            return result
        # The first and the last entry have other numbers of messages than most.
        sizes = [one.per_entry for one in samples]
        if len(sizes) > 2:
            sizes[0], sizes[-1] = sizes[1], sizes[-2]
        ends = [*(one.number for one in samples[1:]), len(self._entries)]
        stretches = [
            (end - here.number) * size for here, end, size in zip(samples, ends, sizes, strict=True)
        ]
        scale = self._messages(samples) / sum(stretches)
        times_ms = [one.publish_ms for one in samples]
        for here, until_ms, stretch in zip(
            samples, [*times_ms[1:], times_ms[-1]], stretches, strict=True
        ):
            weight = stretch * scale / here.read
            spread_ms = 0 if self._in_window else until_ms - here.publish_ms
            result.add(here.pending, weight, spread_ms)
            result.add(here.cancelling, -weight, spread_ms)
        return result

    def _messages(self, samples: list[_EntrySample]) -> float:
        """Return the approximate number of messages, pending or not."""
        entries, stored = len(self._entries), self._entries.bytes
        if self._per_entry is not None and self._counted:
            return entries * self._per_entry
        if stored is not None and all(one.size for one in samples):
            sampled_bytes = sum(one.per_entry * one.size for one in samples)
            size = sampled_bytes / sum(one.per_entry for one in samples)
            found = (stored - entries * _ENTRY_BYTES) / size
            return min(max(found, float(entries)), float(entries * LARGEST_BATCH))
        if len(samples) > 3:
            samples = samples[1:-1]
        return entries * (self._per_entry or sum(one.per_entry for one in samples) / len(samples))


def _stored_bytes(message: ParkedMessage) -> float:
    """Return the approximate number of bytes of an uncompressed message in an entry."""
    properties = message.properties
    texts = [message.key, message.ordering_key, *properties, *properties.values()]
    encoded = sum(len(text.encode("utf-8", "replace")) for text in texts)
    event_time = _EVENT_TIME_BYTES if message.event_ms else 0
    return _MESSAGE_BYTES + _PROPERTY_BYTES * len(properties) + encoded + event_time + message.size
