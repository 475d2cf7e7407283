"""Errors as the command line says them, and a row for each of several messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.tables import Column
from delaylevel.cli.views.terminal import Tone
from delaylevel.cluster.connection import local_brokers
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import DelayLevelError

# Parts of texts that offer something only a program can do, and what a command offers instead.
_PHRASES = (
    (
        "raise maximum_delay, or let such messages recirculate with overflow='recirculate'",
        "raise it with `delaylevel levels expand --max-delay`, or use a level topic that was "
        "created with --overflow recirculate",
    ),
    (", or allow the producer to (create_level_topic=True)", ""),
    ("give it a maximum_delay of", "give it, with --then UNIT:MAX, a longest delay of"),
    ("Name it with admin_url, --admin-url or", "Name it with --admin-url or"),
    ("(delay_level_topic=…, --level-topic)", "(--level-topic)"),
    ("overflow='recirculate'", "--overflow recirculate"),
    ("overflow='reject'", "--overflow reject"),
)
_OPTIONS = {
    "admin_url": "--admin-url",
    "attribute": "--attribute",
    "delay_level_namespace": "--level-namespace",
    "delay_level_topic": "--level-topic",
    "deliver_after": "--after",
    "deliver_at": "--at",
    "expire_after_ms": "--expire-after",
    "expires_after": "--expires-after",
    "expires_at": "--expires-at",
    "hold_pause_ms": "--hold-pause",
    "maximum_delay": "--max-delay",
    "on_missing_target": "--on-missing-target",
    "partition_by": "--unit",
    "service_url": "--service-url",
    "window_partitions": "--window-partitions",
}
# Whole words that are no part of a name, a path or a quoted value.
_WORD = re.compile(
    r"(?<![\w/'\"`.-])(" + "|".join(sorted(_OPTIONS, key=len, reverse=True)) + r")(?![\w/'\"`-])"
)
# English words, too: an argument only with a value.
_PLAIN_WORDS = frozenset(("attribute",))


def with_options(error: DelayLevelError | str) -> str:
    """Return the text of an error with the names of options."""
    text = str(error)
    for phrase, instead in _PHRASES:
        text = text.replace(phrase, instead)

    def option(found: re.Match[str]) -> str:
        name = found[1]
        if name in _PLAIN_WORDS and text[found.end() : found.end() + 1] != "=":
            return name
        return _OPTIONS[name]

    return _WORD.sub(option, text)


def unreachable_hint(flags: dict[str, object]) -> str:
    """Return the advice for a broker that does not answer; name a stopped private broker."""
    try:
        connection = Connection.load(**flags)  # type: ignore[arg-type]
        found = local_brokers.instances()
    except (DelayLevelError, OSError):
        found = []
    stopped = [
        item
        for item in found
        if not item.running
        and (
            item.service_url == connection.service_url
            or connection.origin == "Pulsar's default addresses"
        )
    ]
    check = "Is the cluster running, and are --service-url and --admin-url correct?"
    if len(stopped) == 1 or any(item.name == "default" for item in stopped):
        name = "default" if any(item.name == "default" for item in stopped) else stopped[0].name
        option = "" if name == "default" else f" --name {name}"
        return (
            f"The private broker {name!r} on this machine is stopped: `delaylevel broker start"
            f"{option}` starts it, with its data. For another cluster, give --service-url and "
            "--admin-url."
        )
    return f"{check} `delaylevel broker start` starts a private broker on this machine."


_TONES: dict[str, Tone] = {
    "failed": "red",
    "unconfirmed": "red",
    "both": "red",
    "too late": "yellow",
    "unknown": "yellow",
    "still dead": "yellow",
    "not tried": "yellow",
    "not found": "yellow",
}


def outcome_tone(outcome: Any, _: Any) -> Tone | None:
    """Return the colour of an outcome that needs attention."""
    return _TONES.get(outcome)


def failure_view(error: BaseException) -> dict[str, Any]:
    """Return outcome and reason of a call that failed to store something, for a row."""
    # It imports the Pulsar client, and every command imports this module.
    from delaylevel.changes import Failure

    failure = Failure.of(error)
    return {"outcome": failure.outcome, "reason": with_options(failure.reason)}


def finish(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: str,
    *,
    done: int,
    of: int,
    empty: str,
) -> None:
    """Print a row for each message; end with exit code 1 unless all of them are done.

    Args:
        done: number of messages for which the command did what was asked.
    """
    emit(rows, columns, output, empty=empty)
    if 0 < of != done:
        note(f"{done:,} of {of:,} messages are done; OUTCOME and REASON say what became of others.")
    if not of or done != of:
        click.get_current_context().exit(1)
