"""Live queries about the messages that a dispatcher keeps, answered while it releases them.

Theory of operation. The thread of a partition owner changes the delay queue, and it must not wait
for a query. So a query has two steps:

1. The question is an event for the owner. It copies references, not rows: the columns of the
   pending rows in memory are arrays that never change, and files are only appended to. This takes
   well under a millisecond, whatever the number of messages, and gives one consistent moment.
2. The thread of the HTTP service cuts, sorts and formats these rows (`QueueView`), in numpy, Arrow
   and system calls, which leave the interpreter to the owner. Where it runs Python code, it takes
   its turn for a slice of some tenths of a millisecond, behind all owners (`host.py`).

A message that is cancelled leaves its row only at its due time, and nobody searches for it before.
So an answer has such rows, and says how many there are.

A file that is used up between the two steps is gone; then the question is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delaylevel.dispatcher.assignment import ServedGroup
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.host import WORK_LOCK
from delaylevel.dispatcher.journal.records import entry_of
from delaylevel.dispatcher.record import Batch, attributes
from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.errors import InvalidInputError
from delaylevel.model.level_topic import LevelTopicDescription, named_in
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.positions import ENTRY_MASK
from delaylevel.structures.rows import Int64s
from delaylevel.structures.segments.file import Columns
from delaylevel.structures.segments.frozen import FrozenRows, Range
from delaylevel.web.reports import LiveAnswer, QueryRefusedError

#: Number of rows of `pending`, by default and at most.
ROWS, MOST_ROWS = 1_000, 100_000
MOST_EDGES = 1_000
#: Time to wait for the owners, in s.
_TIMEOUT_S = 2.0
#: Number of attempts of a query, each of which may meet a file that is used up meanwhile.
_ATTEMPTS = 5
#: A search for the first rows of many cuts the range into pieces, a few times.
_NARROWINGS, _PIECES = 6, 16
_FIRST_MS, _LAST_MS = 1, 1 << 53
_RANGE = ("topic", "attribute", "from", "to", "min", "max")
#: The values of a row: the position is that in the window partition.
COLUMNS = ("due_ms", "partition", "ledger", "entry", "batch", "attribute")
_BATCH_MASK, _BATCH_BITS = 1023, 10
_Groups = Sequence[ServedGroup]


# Rank of queries for the lock: behind all partitions that publish or are read.
_QUERYING = 1 << 20


class QueueView(FrozenRows):
    """The messages of a delay queue that are not released, as they are when it is made.

    Its thread makes it; another thread asks the questions, and closes it. These messages count:
    those that wait for their due time, or for their target, and those in flight until their commit.
    A message without a readable due time has the due time 0. A cancelled message is there until its
    due time, and so is a cancellation that waits for its message.
    """

    def __init__(self, delay_queue: DelayQueue, wanted: Range) -> None:
        super().__init__(wanted, partial(WORK_LOCK.hold, _QUERYING))
        self.attribute = delay_queue.pending.attribute
        self.read_to = delay_queue.last_offered  # all before it are known
        self.cancelled = delay_queue.cancelling.cancelled
        self.cancellations = delay_queue.cancelling.waiting
        for index in (delay_queue.pending, *delay_queue.waiting.overflows):
            index.segments.freeze(self)
        self.add((), partial(_in_due_order, Batch.join(delay_queue.loose), self.attribute))


def _in_due_order(messages: Batch, attribute: str) -> Columns:
    """Return messages outside the segments: in flight, or waiting for their target."""
    rows = messages.rows
    order = np.lexsort(rows[::-1])
    return Columns(rows[:, order], attributes(attribute, messages.records)[order])


def named(descriptions: Sequence[LevelTopicDescription], name: str) -> LevelTopicDescription:
    """Return the level topic that a request names; without a name, the only one."""
    names = ", ".join(each.topic for each in descriptions) or "nothing"
    if not name:
        if len(descriptions) == 1:
            return descriptions[0]
        raise QueryRefusedError(f"name one level topic with topic=: {names}")
    try:
        found = named_in(descriptions, TopicName.parse(name).full)
    except InvalidInputError as error:
        raise QueryRefusedError(str(error)) from None
    if found is None:
        raise QueryRefusedError(f"{name[:200]} is not served here, only {names}", 404)
    return found


def check_known(parameters: Mapping[str, str], known: Sequence[str]) -> None:
    """Refuse a request with other parameters than the known ones."""
    for name in sorted(set(parameters) - set(known)):
        text = f"there is no parameter {name[:40]!r}; there are {', '.join(known)}"
        raise QueryRefusedError(text)


@contextmanager
def _asked(
    groups: _Groups, now_ms: int, parameters: Mapping[str, str], *more: str
) -> Iterator[tuple[dict[int, QueueView], dict[str, Any]]]:
    """Yield the views of a level topic by window partition, and the head of the answer.

    The views, which all have the same attribute, are made by the owners, and closed at the end.
    """
    check_known(parameters, (*_RANGE, *more))
    found = named([group.description for group in groups], parameters.get("topic", ""))
    group = next(group for group in groups if group.description is found)
    description = group.description
    wanted = Range(
        max(_FIRST_MS, _integer(parameters, "from", _FIRST_MS)),
        min(_LAST_MS, _integer(parameters, "to", _LAST_MS)),
        _number(parameters, "min", -np.inf),
        _number(parameters, "max", np.inf),
    )
    views: dict[int, QueueView] = {}
    missing: dict[int, str] = {}
    asked: dict[int, Future[QueueView]] = {}
    try:
        for index, owner in sorted(group.owners.items()):
            reason = incomplete(owner.stats.now())
            if reason:
                missing[index] = reason
            else:
                asked[index] = owner.events.ask(lambda queue: QueueView(queue, wanted))
        wait(asked.values(), _TIMEOUT_S)
        for index, answer in asked.items():
            if answer.done():
                views[index] = answer.result()
            else:
                missing[index] = "its thread has not answered"
        if len({view.attribute for view in views.values()}) > 1:
            for index, view in list(views.items()):
                if view.attribute != description.attribute:
                    del views[index]
                    missing[index] = "it has been owned since before the attribute was changed"
        known = next((view.attribute for view in views.values()), description.attribute)
        attribute = parameters.get("attribute", known)
        if attribute != known:
            raise QueryRefusedError(
                f"the attribute of {description.topic} is {known!r} here, not "
                f"{attribute[:40]!r}: set it with `delaylevel levels set --attribute`, which "
                "dispatchers apply when they are started again",
                409,
            )
        if not views:
            reasons = "; ".join(f"partition {k}: {why}" for k, why in missing.items())
            raise QueryRefusedError(
                f"no window partition can be asked here ({reasons or 'none is owned'})", 503
            )
        yield (
            views,
            {
                "level_topic": description.topic,
                "dispatcher": group.name,
                "attribute": known,
                "now_ms": now_ms,
                "partitions": list(views),
                "missing": {str(index): why for index, why in missing.items()},
                "read_to": {str(index): _position(view.read_to) for index, view in views.items()},
                "cancelled": sum(view.cancelled for view in views.values()),
                "cancellations": sum(view.cancellations for view in views.values()),
                "window_partitions": description.window_partitions,
            },
        )
    finally:
        for answer in asked.values():
            if not answer.cancel():
                answer.add_done_callback(_close)


def _pending(groups: _Groups, now_ms: int, parameters: Mapping[str, str]) -> LiveAnswer:
    limit = _integer(parameters, "limit", ROWS)
    if not 1 <= limit <= MOST_ROWS:
        raise QueryRefusedError(f"limit has to be from 1 to {MOST_ROWS}")
    bounded = {"min", "max"}.isdisjoint(parameters)
    with _asked(groups, now_ms, parameters, "limit") as (found, head):
        views = list(found.values())
        count = before_ms = None
        if bounded:
            count, before_ms = _leading(views, limit)
        rows = _merged([view.table(before_ms) for view in views], list(found))
    count = rows.num_rows if count is None else count
    if rows.num_rows > limit:
        # Rows that are due with the last one come too, so that the limit never depends on the
        # order of messages with equal due times.
        due = rows["due_ms"].chunk(0).to_numpy()
        limit = min(int(due.searchsorted(due[limit - 1], side="right")), MOST_ROWS)
        rows = rows.slice(0, limit)
    head |= {
        "messages": count,
        "more": count > rows.num_rows,
        "without_number": rows["attribute"].null_count,
    }
    head |= {"columns": COLUMNS}
    body = b"".join((json.dumps(head)[:-1].encode(), b', "rows": [\n', _rows_json(rows), b"]}\n"))
    return LiveAnswer("application/json", body)


def _average(groups: _Groups, now_ms: int, parameters: Mapping[str, str]) -> LiveAnswer:
    with _asked(groups, now_ms, parameters) as (views, head):
        found = np.concatenate([view.attributes() for view in views.values()])
    numbers = found[~np.isnan(found)]
    any_ = bool(numbers.size)
    total = float(numbers.sum()) if any_ else None
    head |= {
        "messages": found.size,
        "counted": numbers.size,
        "without_number": found.size - numbers.size,
        "mean": None if total is None else total / numbers.size,
        "least": float(numbers.min()) if any_ else None,
        "most": float(numbers.max()) if any_ else None,
        "total": total,
    }
    return _as_json(head)


def _counts(groups: _Groups, now_ms: int, parameters: Mapping[str, str]) -> LiveAnswer:
    if not {"min", "max", "attribute"}.isdisjoint(parameters):
        raise QueryRefusedError("counts are by due time only: give from, to and edges")
    text = parameters.get("edges")
    if text is None:
        edges = [now_ms + ms for ms in (0, 60_000, 3_600_000, 86_400_000)]
    else:
        parts = text.split(",")
        if len(parts) > MOST_EDGES:
            raise QueryRefusedError(f"there may be at most {MOST_EDGES} edges")
        edges = [_integer({"edges": part}, "edges", 0) for part in parts]
        if any(one >= other for one, other in pairwise(edges)):
            raise QueryRefusedError("the edges have to rise")
    with _asked(groups, now_ms, parameters, "edges") as (views, head):
        times: Int64s = np.array([*edges, _LAST_MS], dtype=np.int64)
        counts = np.diff(_before(list(views.values()), times), prepend=0).tolist()
    head |= {"edges_ms": edges, "counts": counts, "messages": sum(counts)}
    return _as_json(head)


_QUESTIONS = {"pending": _pending, "average": _average, "counts": _counts}


def answer(
    groups: _Groups, now_ms: int, question: str, parameters: Mapping[str, str]
) -> LiveAnswer:
    """Answer a live query about the level topics that are served here."""
    for _ in range(_ATTEMPTS):
        try:
            return _QUESTIONS[question](groups, now_ms, parameters)
        except FileNotFoundError:
            continue  # a file was used up meanwhile
    raise QueryRefusedError("the spill files change too fast: ask again", 503)


def _leading(views: Sequence[QueueView], limit: int) -> tuple[int, int | None]:
    """Return the number of messages, and a time before which at least ``limit`` of them are due.

    Nearly all of it is known without reading the rows, so that the first ones of many do not need
    all others. The time is None if there are few others.
    """
    spans = [span for view in views if (span := view.span) is not None]
    if not spans:
        return 0, None
    low, high = min(first for first, _ in spans), max(last for _, last in spans) + 1
    (count,) = _before(views, np.array([high], dtype=np.int64)).tolist()
    if count <= 2 * limit:
        return count, None
    for _ in range(_NARROWINGS):
        edges = np.unique(np.linspace(low, high, _PIECES + 1).astype(np.int64)[1:])
        before = _before(views, edges)
        index = int(before.searchsorted(limit))
        low, high = (int(edges[index - 1]) if index else low), int(edges[index])
        if before[index] <= 2 * limit or high - low <= 1:
            break
    return count, high


def _before(views: Sequence[QueueView], edges_ms: Int64s) -> Int64s:
    """Return the number of messages due before each edge."""
    total: Int64s = np.sum([view.counts(edges_ms) for view in views], axis=0, dtype=np.int64)
    return total


def incomplete(stats: OwnerStats) -> str:
    """Return why the delay queue of an owner has not all pending messages; empty if it has."""
    if stats.state != "releasing":
        return f"its state is {stats.state!r}"
    return "" if stats.caught_up else "it is not caught up"


def _position(packed: int) -> list[int] | None:
    """Return a packed position as ledger, entry and batch index; None before all messages."""
    at = entry_of(packed)
    return [at.ledger, at.entry, packed & _BATCH_MASK] if packed >= 0 else None


def _close(answer: Future[QueueView]) -> None:
    """Close a view, which may be made later than anybody waits for it."""
    if answer.exception() is None:
        answer.result().close()


def _merged(tables: Sequence[pa.Table], partitions: Sequence[int]) -> pa.Table:
    """Return the rows of several partitions in due order, with a column ``partition``."""
    whole = pa.concat_tables(
        [
            table.append_column("partition", pa.repeat(pa.scalar(index, pa.int32()), len(table)))
            for table, index in zip(tables, partitions, strict=True)
        ]
    ).combine_chunks()
    if len(tables) > 1 and whole.num_rows:
        # Stable: rows with equal due times stay in the order of partitions and positions.
        due = whole["due_ms"].chunk(0).to_numpy()
        whole = whole.take(pa.array(due.argsort(kind="stable"))).combine_chunks()
    attribute = pc.if_else(pc.is_nan(whole["attribute"]), None, whole["attribute"])
    return whole.set_column(whole.column_names.index("attribute"), "attribute", attribute)


def _rows_json(rows: pa.Table) -> bytes:
    """Return rows as JSON arrays, with the values of `COLUMNS`, and commas between them."""
    # Arrow formats them without the interpreter's lock, which `json.dumps` would hold throughout.
    if not rows.num_rows:
        return b""

    def text(values: Any) -> Any:
        return pc.cast(values, pa.string())

    entry = pc.bit_wise_and(rows["entry_id"], ENTRY_MASK)
    lines = pc.binary_join_element_wise(
        text(rows["due_ms"]),
        text(rows["partition"]),
        text(rows["ledger_id"]),
        text(pc.shift_right(entry, _BATCH_BITS)),
        text(pc.bit_wise_and(entry, _BATCH_MASK)),
        pc.fill_null(text(rows["attribute"]), "null"),
        ",",
    ).combine_chunks()
    whole = pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "],\n[")
    buffer = whole.buffers()[2]
    return b"".join((b"[", memoryview(buffer)[: len(buffer)], b"]"))


def _as_json(value: Mapping[str, Any]) -> LiveAnswer:
    return LiveAnswer("application/json", json.dumps(value).encode() + b"\n")


def _integer(parameters: Mapping[str, str], name: str, default: int) -> int:
    text = parameters.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isdecimal() and digits.isascii() and len(digits) <= 16):
        raise QueryRefusedError(f"{name}={text[:40]!r} is not a whole number")
    return int(text)


def _number(parameters: Mapping[str, str], name: str, default: float) -> float:
    text = parameters.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if np.isnan(value):
        raise QueryRefusedError(f"{name}={text[:40]!r} is not a number")
    return value
