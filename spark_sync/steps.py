"""A user's own steps between source and sink, and the checks that keep them safe."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from inspect import getfile
from operator import lt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame

from delaylevel.errors import ConfigError, StepsError

from .arrow_rows import REQUIRED, SCHEMA

log = logging.getLogger(__name__)

Steps = Callable[[DataFrame], DataFrame]

# The position where a message was read. It identifies a row.
POSITION = ("topic", "ledger", "entry", "batch")

# Operations that keep rows in the task that read them, and in their order.
_IN_PLACE = {
    "CollectMetrics",
    "Filter",
    "Project",
    "ResolvedHint",
    "StreamingRelationV2",
    "SubqueryAlias",
    "View",
}
# Operations that keep state from one batch to the next.
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
    """Import the function ``package.module:function``; also find modules of the current folder."""
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


def apply_steps(frame: DataFrame, steps: Steps) -> DataFrame:
    """Append a user's steps to the source."""
    # If they may move rows into other tasks, rows are grouped by their source partition again and
    # sorted: then `forward_rows` detects every second copy of a row.
    try:
        result: Any = steps(frame)
    except Exception as error:
        log.debug("the steps failed", exc_info=True)
        where = place_of_failure(traceback.format_tb(error.__traceback__))
        raise StepsError(f"the steps failed{where}: {cause_of(error)}") from None
    if not isinstance(result, DataFrame):
        raise StepsError(
            f"the steps return a {type(result).__name__}: they take a DataFrame and return one"
        )
    _check_columns(result)
    plan = result._jdf.queryExecution().analyzed()
    names = _check_plan(plan)
    if names <= _IN_PLACE:
        return result
    # Let Spark check the steps now, because its own check at the start of the query is switched
    # off: see LOCAL_SORT_ALLOWED.
    spark: Any = result.sparkSession
    jvm = spark._jvm.org.apache.spark.sql
    try:
        jvm.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(
            plan, jvm.streaming.OutputMode.Append()
        )
    except AnalysisException as error:
        raise StepsError(f"the steps cannot run on a stream: {cause_of(error)}") from None
    return result.repartition("topic").sortWithinPartitions(*POSITION)


_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
# Code that is not the user's: here, and on an executor, where the paths are others.
_OURS = tuple(os.path.dirname(file) + os.sep for file in (getfile(StepsError), __file__))
_LIBRARIES = re.compile(r"[/\\](pyspark|py4j|(site-)?packages[/\\]delaylevel)[/\\.]|<frozen ")
# The last line of a Python traceback, not of a Java stack trace.
_PYTHON_ERROR = re.compile(
    r"(?!(org|java|scala|py4j|pyspark|at|Caused)\b)[A-Za-z_][\w.]*(Error|Exception)\b"
)
_ENDED = "terminated with exception: "
_CODES = re.compile(r"( SQLSTATE: \w+)+;?.*$")


def place_of_failure(lines: Iterable[str]) -> str:
    """Return `` at line 8 of steps.py, in fits`` for the innermost line of the user's own code."""
    found = ""
    for line in lines:
        frame = _FRAME.match(line)
        if frame is None or frame["file"].startswith(_OURS) or _LIBRARIES.search(frame["file"]):
            continue
        found = f" at line {frame['line']} of {frame['file']}, in {frame['name']}"
    return found


def cause_of(error: BaseException) -> str:
    """Return an error in one line, without the text that Spark adds to it."""
    lines = str(error).strip().splitlines()
    if not isinstance(error, PySparkException):
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    for line in reversed(lines):
        if _PYTHON_ERROR.match(line):
            return line.strip()
    first = lines[0] if lines else type(error).__name__
    return _CODES.sub("", first.partition(_ENDED)[2] or first)


# Spark can run a query that sorts the rows of each task, but refuses it: its check does not
# distinguish a sort within partitions from a sort of the whole stream.
LOCAL_SORT_ALLOWED = {"spark.sql.streaming.unsupportedOperationCheck": "false"}


def dropped(progress: Any) -> int:
    """Return the number of rows of a batch (``StreamingQueryProgress``) that steps dropped."""
    rows_out = progress.sink.numOutputRows
    return max(0, progress.numInputRows - rows_out) if rows_out >= 0 else 0


class DuplicateCheck:
    """Detector of rows that appear twice in one task, e.g. after a join with several matches."""

    # Rows come in the order of their positions, from the source and from `apply_steps`, so it
    # compares neighbours.
    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}

    def check(self, batch: pa.RecordBatch) -> None:
        """Check the rows of a record batch, before any of them is forwarded."""
        topics = batch.column("topic")
        rows = batch.select(list(POSITION[1:]))
        names = topics.unique().to_pylist()
        for name in names:
            chosen = rows if len(names) == 1 else rows.filter(pc.equal(topics, name))
            self._check(name, list(zip(*(part.to_pylist() for part in chosen), strict=True)))

    def _check(self, topic: str, positions: list[tuple[int, int, int]]) -> None:
        before = [self._last.get(topic, (-1, -1, -1)), *positions]
        self._last[topic] = positions[-1]
        if all(map(lt, before, positions)):
            return
        wrong = next(each for last, each in zip(before, positions, strict=False) if each <= last)
        where = ":".join(str(number) for number in wrong)
        raise StepsError(
            f"the message at {where} of {topic} came twice in one batch: the steps multiply rows "
            "(a join with several matches, explode). Nothing of the batch is acknowledged; let "
            "each row match at most once, e.g. with dropDuplicates on the other table or a "
            "left_semi join"
        )


def _check_columns(result: DataFrame) -> None:
    if not result.isStreaming:
        raise StepsError(
            "the steps return a DataFrame that is not a stream: derive it from the given one"
        )
    for name in REQUIRED:
        kind = SCHEMA[name].dataType.simpleString()
        found = [one.dataType.simpleString() for one in result.schema.fields if one.name == name]
        if found != [kind]:
            raise StepsError(
                f"the steps return {' and '.join(found) or 'nothing'} as {name}, which must be one "
                f"{kind}: the message consists of the columns of the source, so keep each of them. "
                "Further columns are allowed"
            )


def _check_plan(plan: Any) -> set[str]:
    """Return the names of the operations on the stream; refuse those that are not safe."""
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
                f"the steps contain {name}, which keeps state from batch to batch: rows would be "
                "acknowledged before they are forwarded. Process one row at a time, or join it "
                "with a table"
            )
        if node.subqueries().size():
            name = f"{name} with a subquery"
        names.add(name)
        nodes += children
    if sources > 1:
        raise StepsError(
            "the steps read more than one stream (a union or join of the rows with themselves, or "
            "with another stream): use the given DataFrame once, and join it only with tables"
        )
    return names
