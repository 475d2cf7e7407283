"""A user's own steps between source and sink, and what keeps them safe."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import lt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from delaylevel.errors import ConfigError, StepsError
from delaylevel.model.delivery import Delivery

from .arrow_rows import SCHEMA

Steps = Callable[[DataFrame], DataFrame]

# Where a row was read. Every row that is sent on has its own.
POSITION = ("topic", "ledger", "entry", "batch")

_CHECK = "spark.sql.streaming.unsupportedOperationCheck"

# These leave rows in the task in which they were read, in their order.
_IN_PLACE = {
    "CollectMetrics",
    "Filter",
    "Project",
    "ResolvedHint",
    "StreamingRelationV2",
    "SubqueryAlias",
    "View",
}
# These keep rows, or remember them, from one batch to the next.
_STATEFUL = {
    "Aggregate",
    "Deduplicate",
    "DeduplicateWithinWatermark",
    "Distinct",
    "FlatMapGroupsInPandasWithState",
    "FlatMapGroupsWithState",
    "GlobalLimit",
    "LocalLimit",
    "TransformWithState",
    "TransformWithStateInPandas",
    "TransformWithStateInPySpark",
}


def load_steps(name: str) -> Steps:
    """Import the function that ``package.module:function`` names.

    Modules of the present folder are found, too.

    Raises:
        ConfigError: there is no such function; the text says what is missing.
    """
    module_name, separator, function_name = name.partition(":")
    if not (separator and module_name and function_name):
        raise ConfigError(f"steps {name!r}: write package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"steps {name!r}: {error}") from error
    function: Any = getattr(found, function_name, None)
    if not callable(function):
        raise ConfigError(f"steps {name!r}: {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return]


def apply_steps(frame: DataFrame, steps: Steps, delivery: Delivery) -> DataFrame:
    """Put a user's steps behind the source.

    Where they may move rows into other tasks, rows are brought together again by their source
    partition and put in order: so the sink sees every second copy of a row, and effectively-once
    gets the order that it needs.

    Args:
        frame: what the source yields.
        steps: takes it and returns what is to be sent on.
        delivery: what the job promises.

    Raises:
        StepsError: what the steps return cannot be sent on; the text says what to do.
    """
    result: Any = steps(frame)
    if not isinstance(result, DataFrame):
        raise StepsError(
            f"the steps return a {type(result).__name__}: they take a DataFrame and return one"
        )
    _check_columns(result)
    plan = result._jdf.queryExecution().analyzed()
    names = _check_plan(plan)
    once = delivery is Delivery.EFFECTIVELY_ONCE
    if once and not plan.deterministic():
        raise StepsError(
            "the steps contain something that differs when a batch is repeated (rand, uuid, a "
            "nondeterministic function): effectively-once cannot be kept; take it out, or use "
            "at-least-once"
        )
    if not once and names <= _IN_PLACE:
        return result
    # Spark is asked now what it thinks of the steps, because its own look at the start of the
    # query is left out: see local_sort_allowed().
    spark: Any = result.sparkSession
    jvm = spark._jvm.org.apache.spark.sql
    try:
        jvm.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(
            plan, jvm.streaming.OutputMode.Append()
        )
    except AnalysisException as error:
        raise StepsError(f"the steps cannot run on a stream: {error}") from error
    return result.repartition("topic").sortWithinPartitions(*POSITION)


@contextmanager
def local_sort_allowed(spark: SparkSession) -> Iterator[None]:
    """Let a query be started that sorts the rows of each task.

    Spark does that well and refuses it all the same: it does not tell a sort within partitions
    from one of the whole stream.
    """
    before = spark.conf.get(_CHECK)
    spark.conf.set(_CHECK, "false")
    try:
        yield
    finally:
        spark.conf.set(_CHECK, before)


def dropped(progress: Any) -> int:
    """Return how many rows of a batch the steps have left out.

    Args:
        progress: a ``StreamingQueryProgress``.
    """
    arrived = progress.sink.numOutputRows
    return max(0, progress.numInputRows - arrived) if arrived >= 0 else 0


class TwiceCheck:
    """Finds rows of one task that come a second time, as after a join that multiplies.

    Costs little while rows come in the order of their positions, as they do from the source and
    from :func:`apply_steps`. From the first row that does not, all are remembered.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}
        self._seen: dict[str, set[tuple[int, int, int]]] = {}

    def look(self, batch: pa.RecordBatch) -> None:
        """Look at the rows of a record batch, before any of them is sent on.

        Raises:
            StepsError: the same position has come twice.
        """
        topics = batch.column("topic")
        rows = batch.select(list(POSITION[1:]))
        names = topics.unique().to_pylist()
        for name in names:
            chosen = rows if len(names) == 1 else rows.filter(pc.equal(topics, name))
            self._look(name, list(zip(*(part.to_pylist() for part in chosen), strict=True)))

    def _look(self, topic: str, places: list[tuple[int, int, int]]) -> None:
        last = self._last.get(topic, (-1, -1, -1))
        if last < places[0] and all(map(lt, places, places[1:])):
            self._last[topic] = places[-1]
            return
        seen = self._seen.setdefault(topic, set())
        for place in places:
            if place == last or place in seen:
                where = ":".join(str(number) for number in place)
                raise StepsError(
                    f"the message at {where} of {topic} came twice in one batch: the steps "
                    "multiply rows (a join with several matches, explode). Nothing of the batch "
                    "is acknowledged; let each row match once at the most, e.g. with "
                    "dropDuplicates on the other table or a left_semi join"
                )
            seen.add(place)
            last = max(last, place)
        self._last[topic] = last


def _check_columns(result: DataFrame) -> None:
    if not result.isStreaming:
        raise StepsError(
            "the steps return a DataFrame that is not a stream: build it from the one they are "
            "given"
        )
    kinds = {field.name: field.dataType.simpleString() for field in result.schema.fields}
    missing = [name for name in SCHEMA.fieldNames() if name not in kinds]
    if missing:
        raise StepsError(
            f"the steps lose {', '.join(missing)}: keep every column of the source under its name; "
            "they carry the message on. Columns of your own may stay"
        )
    names = result.columns
    twice = sorted({name for name in names if names.count(name) > 1 and name in set(SCHEMA.names)})
    if twice:
        raise StepsError(f"the steps return {', '.join(twice)} twice: drop or rename the other one")
    for field in SCHEMA.fields:
        kind = field.dataType.simpleString()
        if kinds[field.name] != kind:
            raise StepsError(
                f"the steps make {field.name} a {kinds[field.name]}: it has to stay a {kind}"
            )


def _check_plan(plan: Any) -> set[str]:
    """Return the names of what the steps do to the stream; refuse what is not safe."""
    names: set[str] = set()
    sources = 0
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        if not node.isStreaming():
            continue
        name = node.nodeName()
        children = [node.children().apply(i) for i in range(node.children().size())]
        if not children:
            sources += 1
        if name in _STATEFUL:
            raise StepsError(
                f"the steps contain {name}, which keeps rows or a memory of them from batch to "
                "batch: they would be acknowledged before they are sent on. Steps look at one "
                "row at a time, or join it with a table"
            )
        if node.subqueries().size():
            name = f"{name} with a subquery"
        names.add(name)
        nodes += children
    if sources > 1:
        raise StepsError(
            "the steps read more than one stream (a union or join of the rows with themselves, or "
            "with another stream): take the DataFrame that they are given once, and tables beside"
        )
    return names
