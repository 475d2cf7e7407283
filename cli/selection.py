"""Options that select pending messages, shared by the commands of ``delaylevel pending``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import click

from delaylevel.errors import InvalidInputError
from delaylevel.inspection import Selection, Window

from .inspecting import slack_option, target_option
from .values import TIME, parse_pairs

F = TypeVar("F", bound=Callable[..., Any])

key_option = click.option("--key", metavar="KEY", help="Partition key to match.")
property_option = click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="KEY=VALUE",
    callback=parse_pairs,
    help="Property to match. Repeatable.",
)
id_option = click.option(
    "--id", "message_id", metavar="ID", help="Stable ID (delaylevel.id) to match."
)


@dataclass(frozen=True)
class Chosen:
    """The messages that the options select.

    Attributes:
        selection: the conditions.
        target: the business topic to match, or None for all.
        slack: the longest outage or clock difference that a search by due time allows for;
            None for the default.
    """

    selection: Selection
    target: str | None
    slack: timedelta | None

    @property
    def single_id(self) -> str | None:
        """The ID, if it is the only condition: then one read may find the message."""
        id_ = self.selection.id
        return id_ if self.selection == Selection(id=id_) else None


def selection_options(function: F) -> Callable[..., Any]:
    """Add the options that select messages, passed to the command as one ``Chosen``."""

    @functools.wraps(function)
    def command(
        *args: Any,
        from_ms: int | None,
        before_ms: int | None,
        where: str | None,
        message_id: str | None,
        key: str | None,
        properties: dict[str, str],
        target: str | None,
        slack: timedelta,
        **kwargs: Any,
    ) -> Any:
        if from_ms is not None and before_ms is not None and before_ms <= from_ms:
            raise InvalidInputError("--to is not after --from: nothing can be due in between")
        selection = Selection(Window(from_ms, before_ms), where, key, properties, message_id)
        return function(*args, chosen=Chosen(selection, target, slack), **kwargs)

    options = [
        click.option(
            "--from", "from_ms", type=TIME, help="Earliest due time: ISO-8601, epoch ms or +2h."
        ),
        click.option(
            "--to",
            "before_ms",
            type=TIME,
            help="End of the due times, excluded: ISO-8601, epoch ms or +2h.",
        ),
        click.option("--where", metavar="SQL", help="Condition on the columns: 'size > 1000'."),
        id_option,
        key_option,
        property_option,
        target_option,
        slack_option,
    ]
    decorated: Callable[..., Any] = command
    for option in reversed(options):
        decorated = option(decorated)
    return decorated
