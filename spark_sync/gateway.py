"""Spark's Java process: its start, and its stderr without a warning that concerns nobody."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

# Java prints it because Spark asks for this module; there is no option against it.
_NO_PROBLEM = re.compile(r"WARNING: Using incubator modules: jdk\.incubator\.vector\s*")


def start_java(conf: Mapping[str, str]) -> None:
    """Start Spark's Java process with the settings of a session, unless it runs.

    Raises:
        PySparkRuntimeError: it ended; its reason is on stderr.
    """
    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    settings = SparkConf()
    for name, value in conf.items():
        settings.set(name, value)
    reading, writing = os.pipe()
    lines = os.fdopen(reading, encoding="utf-8", errors="replace")
    # It must read until the end of the Java process, which would wait for room in a full pipe.
    threading.Thread(target=_copy, args=(lines,), name="spark-stderr", daemon=True).start()
    try:
        gateway = launch_gateway(settings, {"stderr": writing})
    finally:
        os.close(writing)
    SparkContext._ensure_initialized(gateway=gateway, conf=settings)


def _copy(lines: Iterable[str]) -> None:
    """Write lines to stderr, but for the warning that is no problem."""
    for line in lines:
        if not _NO_PROBLEM.fullmatch(line):
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(line)
                sys.stderr.flush()
