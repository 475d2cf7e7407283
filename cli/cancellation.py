"""``delaylevel pending cancel|reschedule|fire|outcome``: changes to pending messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.tables import Column
from delaylevel.cluster.connection.settings import require_reachable
from delaylevel.cluster.failures import close_quietly
from delaylevel.errors import (
    CancellationFailedError,
    InvalidInputError,
    LevelTopicError,
    StillPendingError,
)
from delaylevel.inspection import Inspector, Selection
from delaylevel.inspection.cancelled import CancelledName
from delaylevel.model.clock import duration_ms
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt, Rescheduled, place_of
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient
from delaylevel.producer.receipts import accepted, check_cancellable
from delaylevel.topics.members import metadata_of

from . import options
from .command import Settings, examples, pass_settings
from .failures import Failure, finish, for_each, outcome_tone
from .inspection import Reading, inspector, query, selection_options
from .options import DURATION

if TYPE_CHECKING:
    from delaylevel.inspection.rows import PendingRow


OUTCOMES: tuple[Column, ...] = (
    Column("id", "id"),
    Column("outcome", tone=outcome_tone),
    Column("due_ms", "time", rank=1),
    Column("released_ms", "time", rank=2),
    Column("reason", rank=3),
    Column("target", "topic", wide=True, head="FOR"),
    Column("key", wide=True),
    Column("decided_ms", "time", wide=True),
)
RESCHEDULED = (*OUTCOMES, Column("new_id", head="NEW ID"), Column("new_due_ms", "time", rank=1))


def outcome_view(one: Outcome) -> dict[str, Any]:
    """Return an outcome as one row."""
    return {
        "id": one.id,
        "target": one.target,
        "outcome": one.status.value,
        "due_ms": one.due_ms,
        "decided_ms": one.decided_ms,
        "released_ms": one.released_ms,
        "reason": one.reason or None,
        "key": one.key or None,
    }


F = TypeVar("F", bound=Callable[..., Any])
# Sends one cancellation; a reschedule has a new message, too.
_Change = Callable[[Any, Receipt], Outcome | Rescheduled]

_THREADS = 8


def _changing(function: F) -> F:
    """Add the options that select messages to change, and those of their outcomes."""
    for option in (
        options.output,
        click.option(
            "--timeout",
            type=DURATION,
            help="Time to wait for outcomes; by default they are not waited for.",
        ),
        click.option(
            "--count",
            type=click.IntRange(min=0),
            help="Number of selected messages, as a confirmation.",
        ),
        selection_options,
        click.option(
            "--receipt", metavar="TEXT", help="Receipt of the message, instead of its ID."
        ),
        click.argument("message_id", required=False, metavar="[ID]"),
        click.argument("topic"),
    ):
        function = option(function)
    return function


@examples(
    "delaylevel pending cancel orders renewal-4711",
    "delaylevel pending cancel orders --key customer-7 --count 3 --timeout 1s",
    "delaylevel pending cancel orders --where \"properties['kind'] = 'reminder'\" --count 120",
    "delaylevel pending cancel orders renewal-4711 --at 2030-01-31T12:00:00Z",
)
@click.command()
@_changing
@options.at("due_ms")
@click.option("--partition-key", metavar="KEY", help="Partition key of that message, with --at.")
@pass_settings
def cancel(
    settings: Settings,
    topic: str,
    message_id: str | None,
    due_ms: int | None,
    partition_key: str | None,
    **arguments: Any,
) -> None:
    """Cancel pending messages of TOPIC.

    Select them by ID, receipt, --key, --where or the other conditions. A message that is selected
    by its ID is searched for, unless --at gives its due time. More than one message needs --count.

    OUTCOME is `accepted` until the dispatcher has decided, which it does when the message is nearly
    due. There is a row for each message. The exit code is 0 if all of them are accepted or
    cancelled, and 1 if one of them is failed, too late or unknown, or none is found.
    """
    if due_ms is None and partition_key is not None:
        raise click.UsageError("--partition-key is that of a message given by ID and --at")
    if due_ms is not None and message_id is None:
        raise click.UsageError("--at is the due time of one message: give its ID, too")
    named = None if due_ms is None else (due_ms, partition_key or "")
    _change(settings, topic, message_id, _cancel, OUTCOMES, named=named, **arguments)


@examples(
    "delaylevel pending reschedule orders renewal-4711 --at +2d",
    "delaylevel pending reschedule orders --key customer-7 --count 3 --at 2030-01-31T12:00:00Z",
)
@click.command()
@_changing
@options.at("deliver_at", required=True)
@pass_settings
def reschedule(
    settings: Settings, topic: str, message_id: str | None, deliver_at: int, **arguments: Any
) -> None:
    """Give pending messages of TOPIC another due time.

    Each message is stored again, with a new ID and the new due time. Then the old one is cancelled,
    and OUTCOME is that of its cancellation. At least one of the two is delivered, and if OUTCOME is
    `too late`, both are. Messages are selected as for `delaylevel pending cancel`.

    There is a row for each message. One that could not be stored again is `failed` with the reason,
    and stays as it is; `both` if it was stored again, but the old one could not be cancelled;
    `unconfirmed` if nobody knows. The exit code is 0 if all of them are accepted or cancelled, and
    otherwise 1, also if none is found.
    """
    change = partial(_reschedule, deliver_at)
    _change(settings, topic, message_id, change, RESCHEDULED, **arguments)


@examples(
    "delaylevel pending fire orders renewal-4711",
    "delaylevel pending fire orders --key customer-7 --count 3 --timeout 1s",
)
@click.command()
@_changing
@pass_settings
def fire(settings: Settings, topic: str, message_id: str | None, **arguments: Any) -> None:
    """Deliver pending messages of TOPIC now.

    This is `delaylevel pending reschedule` to the present, with the same outcomes and exit codes.
    """
    _change(settings, topic, message_id, _fire, RESCHEDULED, **arguments)


@examples(
    "delaylevel pending outcome orders",
    "delaylevel pending outcome orders renewal-4711 -o json",
)
@click.command()
@click.argument("topic")
@click.argument("message_id", required=False, metavar="[ID]")
@options.output
@pass_settings
def outcome(settings: Settings, topic: str, message_id: str | None, output: str) -> None:
    """Show the outcomes of cancellations of TOPIC.

    Those of about the last day are shown, one for each message. With ID, only its outcome is shown,
    and the exit code is 1 if there is none: the dispatcher has not decided, or it was long ago.
    """
    with inspector(settings, topic) as look:
        found = look.outcomes().stored(message_id)
    emit(
        [outcome_view(one) for one in found],
        OUTCOMES,
        output,
        empty="No cancellation has an outcome.",
    )
    if message_id is not None and not found:
        click.get_current_context().exit(1)


COMMANDS = (cancel, reschedule, fire, outcome)


def client_of(settings: Settings) -> DelayLevelClient:
    """Open a client for the producers that send cancellations."""
    connection = settings.connection()
    require_reachable(connection)
    return DelayLevelClient.from_connection(connection, logger=settings.client_logger())


@dataclass(frozen=True)
class _Changed:
    """A message and the result of its change.

    Attributes:
        receipt: that of the message.
        outcome: the outcome of its cancellation, or the reason why there is none.
        new: the receipt of the message that replaces it, or None.
    """

    receipt: Receipt
    outcome: Outcome | Failure
    new: Receipt | None = None

    @property
    def done(self) -> bool:
        """True if the message is cancelled, or its cancellation is accepted."""
        return isinstance(self.outcome, Outcome) and self.outcome.status in (
            OutcomeStatus.ACCEPTED,
            OutcomeStatus.CANCELLED,
        )

    @property
    def view(self) -> dict[str, Any]:
        """The result as one row."""
        if isinstance(self.outcome, Failure):
            view = outcome_view(accepted(self.receipt)) | self.outcome.view
        else:
            view = outcome_view(self.outcome)
        if self.new is not None:
            new = self.new
            view |= {"new_id": new.id, "new_due_ms": new.due_ms, "receipt": str(new)}
        return view


def _cancel(producer: Any, receipt: Receipt) -> Outcome:
    cancelled: Outcome = producer.cancel(receipt)
    return cancelled


def _reschedule(deliver_at: int, producer: Any, receipt: Receipt) -> Rescheduled:
    rescheduled: Rescheduled = producer.reschedule(receipt, deliver_at=deliver_at)
    return rescheduled


def _fire(producer: Any, receipt: Receipt) -> Rescheduled:
    fired: Rescheduled = producer.fire_now(receipt)
    return fired


def _change(
    settings: Settings,
    topic: str,
    message_id: str | None,
    change: _Change,
    columns: Sequence[Column],
    *,
    receipt: str | None,
    count: int | None,
    timeout: Any,
    output: str,
    named: tuple[int, str] | None = None,
    **conditions: Any,
) -> None:
    """Change the selected messages, and print the outcomes.

    Args:
        named: due time in ms and partition key of the message with the ID; None to search for it.
        conditions: values of the selection options.
    """
    selected = message_id or conditions["id"]
    if message_id is not None and conditions["id"] is not None:
        raise click.UsageError("give the ID or --id, not both")
    conditions["id"] = selected
    with query(settings, topic, **conditions) as (look, selection, shown):
        check_cancellable(look.description, has_admin=True)
        if receipt is not None or named is not None:
            others = selection == Selection(id=selected)
            if not others or (receipt is not None and selected is not None):
                raise click.UsageError(
                    "a receipt, or an ID with --at, names one message: give no further conditions"
                )
            chosen = [_named(look, receipt, selected, named)]
        else:
            chosen = _found(look, selection, shown)
        shown.close()
        _confirm(chosen, count)
        results = _send(settings, look, chosen, change, timeout) if chosen else []
        # Nothing that can fail stands between the changes and their rows.
        finish(
            [one.view for one in results],
            columns,
            output,
            done=sum(one.done for one in results),
            of=len(results),
            empty="No message matches.",
        )


def _named(
    look: Inspector, receipt: str | None, message_id: str | None, named: tuple[int, str] | None
) -> Receipt:
    """Return the receipt of a message that is not searched for."""
    description = look.description
    if receipt is not None:
        found = Receipt.parse(receipt)
        if found.level_topic != description.topic:
            raise InvalidInputError(
                f"the receipt is that of a message in level topic {found.level_topic}, not "
                f"{description.topic}; nothing was changed"
            )
        description.check_target(found.target)
        return found
    assert message_id is not None
    assert named is not None
    due_ms, key = named
    targets = description.targets if look.target is None else (look.target,)
    if len(targets) != 1:
        raise InvalidInputError(
            f"{description.topic} carries messages for {', '.join(targets)}: give --target; "
            "nothing was changed"
        )
    return Receipt(message_id, due_ms, targets[0], description.topic, key)


def _found(look: Inspector, selection: Selection, shown: Reading) -> list[Receipt]:
    """Return the receipts of the selected messages, without those that are held."""
    if selection == Selection() and look.target is None:
        raise click.UsageError("select messages: by ID, --receipt, --key, --where, --from, --to …")
    reads: dict[str, Any] = {"tell": shown.tell, "expect": shown.expect}
    if selection.id is not None and selection == Selection(id=selection.id):
        rows: Any = look.find(selection.id, **reads)
    else:
        rows = look.rows(selection, **reads)
    found: dict[tuple[str, str, str | None], Receipt] = {}
    held = 0
    for row in rows:
        if row.role == Role.HELD.value or row.due_ms is None:
            held += 1
            continue
        # A message that a mover forwards meanwhile may be there twice.
        found[row.id, row.target, row.key] = _receipt(look.description, row)
    if held:
        note(f"{held:,} selected messages are held or unreadable: they cannot be cancelled.")
    return list(found.values())


def _receipt(description: LevelTopicDescription, row: PendingRow) -> Receipt:
    assert row.due_ms is not None
    assert row.target is not None
    place = place_of(row.topic, row.ledger, row.entry)
    return Receipt(row.id, row.due_ms, row.target, description.topic, row.key or "", place)


def _confirm(chosen: Sequence[Receipt], count: int | None) -> None:
    """Raise an error unless the number of messages is confirmed."""
    if count is None and len(chosen) > 1:
        raise InvalidInputError(
            f"{len(chosen)} messages are selected: confirm with --count {len(chosen)}; nothing was "
            "changed"
        )
    if count is not None and count != len(chosen):
        raise StillPendingError(
            f"{len(chosen)} messages are selected, not {count}: nothing was changed", len(chosen)
        )


def _send(
    settings: Settings, look: Inspector, chosen: Sequence[Receipt], change: _Change, timeout: Any
) -> list[_Changed]:
    """Change messages, and wait for the outcomes of their cancellations."""
    description, outcomes = look.description, look.outcomes()
    if timeout is not None:
        try:
            start = outcomes.end()
        except LevelTopicError as error:
            note(f"Not waiting: {error}.")
            timeout = None

    def apply(receipt: Receipt) -> _Changed:
        try:
            result = change(producers[receipt.target], receipt)
        except CancellationFailedError as error:
            new = Receipt.parse(error.receipt) if error.receipt else None
            return _Changed(receipt, Failure.of(error), new)
        if isinstance(result, Rescheduled):
            return _Changed(receipt, result.outcome, result.receipt)
        return _Changed(receipt, result)

    # Closing it waits for nothing that has not been confirmed.
    client = client_of(settings)
    with contextlib.ExitStack() as stack:
        stack.callback(close_quietly, client, "client")
        producers = {}
        assert client.admin is not None
        for target in sorted({receipt.target for receipt in chosen}):
            if metadata_of(client.admin, TopicName.parse(target)) is None:
                # Opening a producer would create the topic, and release what waits for it.
                raise InvalidInputError(f"{target} does not exist; nothing was changed")
            producers[target] = client.create_producer(
                target,
                enable_delay_level_topic=True,
                delay_level_topic=description.topic,
                create_level_topic=False,
            )
        results = [
            _Changed(receipt, result) if isinstance(result, Failure) else result
            for receipt, result in zip(chosen, for_each(chosen, apply, _THREADS), strict=True)
        ]
    names = {_name(one.receipt) for one in results if _undecided(one)}
    if timeout is None or not names:
        return results
    try:
        decided = outcomes.wait(start, names, duration_ms(timeout) / 1000)
    except (Exception, KeyboardInterrupt) as error:
        note(f"Outcomes could not be waited for: {Failure.of(error).reason}")
        return results
    return [
        replace(one, outcome=decided.get(_name(one.receipt), one.outcome))
        if _undecided(one)
        else one
        for one in results
    ]


def _undecided(one: _Changed) -> bool:
    return isinstance(one.outcome, Outcome) and not one.outcome.final


def _name(receipt: Receipt) -> CancelledName:
    return CancelledName(receipt.id, receipt.target, receipt.key, receipt.due_ms)
