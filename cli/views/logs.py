"""The program's log on stderr: lines of text, or one JSON object for each line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from types import TracebackType

import click

from delaylevel.cluster import logs

from .terminal import width_of, wrapped

FORMATS = ("text", "json")
#: Name of the logger of the program's own messages.
PROGRAM = "delaylevel.cli"

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_json = False


class _StderrHandler(logging.Handler):
    """Handler that writes to the present ``sys.stderr``, which a live region replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            text = self.format(record) + "\n"
        except Exception:  # as in `logging.StreamHandler`
            self.handleError(record)
        else:
            with contextlib.suppress(OSError):  # a service does not end because its log is full
                sys.stderr.write(text)
                sys.stderr.flush()


class JsonFormatter(logging.Formatter):
    """Formatter that writes a record as one line of JSON.

    The keys are ``time`` (ISO-8601, UTC), ``level``, ``logger``, ``thread``, ``message`` and, after
    a failure, ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        entry = {
            "time": _instant(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(log_format: str, level: int) -> None:
    """Send the log to stderr.

    Args:
        log_format: one of `FORMATS`. With ``json``, the program's messages and errors are lines of
            the log, too.
    """
    global _json
    _json = log_format == "json"
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if _json else logging.Formatter(_TEXT))
    logging.basicConfig(handlers=[handler], level=level)
    # On a terminal, the client's lines share the writer of the lines that are drawn in place.
    plain = _print_line if sys.stderr.isatty() else None
    # A line of the client has its own time and level in it.
    own = partial(_print_json, "pulsar", logging.INFO)
    logs.redirect(own if _json else plain)
    logging.captureWarnings(_json)
    if _json:
        sys.excepthook = _log_crash
        threading.excepthook = _log_crash_of_thread


def again() -> Callable[[], None]:
    """Return a function that configures the log of a new interpreter like this one's."""
    return partial(configure, FORMATS[_json], logging.getLogger().level)


def is_json() -> bool:
    """Return True if stderr has lines of JSON only."""
    return _json


def tell(message: str, level: int = logging.INFO) -> None:
    """Print a message of the program on stderr, whatever the level of the log."""
    if _json:
        _print_json(PROGRAM, level, message)
        return
    width = width_of(sys.stderr)
    _print_line("\n".join(wrapped(line, width) for line in message.splitlines()))


def _print_line(line: str) -> None:
    """Print a line on stderr, if that takes it: nothing ends because its log cannot be written."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _print_json(logger: str, level: int, message: str) -> None:
    record = logging.LogRecord(logger, level, "", 0, message, None, None)
    _print_line(JsonFormatter().format(record))


def _log_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    record = logging.LogRecord(
        PROGRAM, logging.CRITICAL, "", 0, str(error) or kind.__name__, None, (kind, error, trace)
    )
    try:
        click.echo(JsonFormatter().format(record), err=True)
    except Exception:  # the traceback must not be lost
        traceback.print_exception(kind, error, trace)


def _log_crash_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and args.exc_type is not SystemExit:
        _log_crash(args.exc_type, args.exc_value, args.exc_traceback)


def _instant(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
