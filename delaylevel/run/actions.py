"""Actions on a running service over HTTP: pause and resume deliveries, cancel and fire messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from delaylevel import changes
from delaylevel.cluster.failures import may_pass, translate_errors
from delaylevel.cluster.port import TopicAdmin
from delaylevel.dispatcher.live import check_known, named
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.inspection import Inspector, Selection
from delaylevel.model.clock import Clock, SystemClock, duration_ms
from delaylevel.model.formatting import parse_duration
from delaylevel.model.level_topic import ALL, LevelTopicDescription
from delaylevel.producer.client import DelayLevelClient
from delaylevel.producer.receipts import check_cancellable, first_copies
from delaylevel.topics import lifecycle
from delaylevel.topics.registry import describe
from delaylevel.web.reports import ActionReport, ActionTopic, QueryRefusedError

if TYPE_CHECKING:
    from delaylevel.inspection.rows import PendingRow

#: Time to wait for the outcome of a cancellation, in s: in the window it takes milliseconds.
OUTCOME_S = 3.0
# The longest search, in s, and the number of messages that are shown.
_SEARCH_S = 20.0
_SHOWN = 50
_VIEW = ("id", "key", "target", "due_ms", "place", "size")
_FIELDS = {
    "pause": ("topic", "target"),
    "resume": ("topic", "target", "spread"),
    "find": ("topic", "target", "id", "key"),
    **dict.fromkeys(("cancel", "fire"), ("topic", "target", "id", "key", "receipt")),
}


class ServiceActions:
    """The actions of a process on the level topics that it serves; see `delaylevel.web.reports`."""

    def __init__(
        self,
        admin: TopicAdmin,
        descriptions: Callable[[], Sequence[LevelTopicDescription]],
        open_inspector: Callable[..., AbstractContextManager[Inspector]],
        open_client: Callable[[], DelayLevelClient],
        clock: Clock | None = None,
    ) -> None:
        self._admin = admin
        self._descriptions = descriptions
        self._open_inspector = open_inspector
        self._open_client = open_client
        self._clock = clock or SystemClock()

    def topics(self) -> Sequence[ActionTopic]:
        served = [each for each in self._descriptions() if each.cancellable]
        # The service itself reads the pauses rarely while nothing is due.
        with suppress(DelayLevelError):
            served = [describe(self._admin, each.topic) for each in served]
        return [ActionTopic(one.topic, one.targets, dict(one.pauses.paused)) for one in served]

    def act(self, action: str, parameters: Mapping[str, str]) -> ActionReport:
        try:
            with translate_errors():
                return self._act(action, parameters)
        except QueryRefusedError as error:
            return ActionReport(error.status, str(error))
        except DelayLevelError as error:
            if isinstance(error, InvalidInputError):
                return ActionReport(400, str(error))
            return ActionReport(503 if may_pass(error) else 409, str(error))

    def _act(self, action: str, parameters: Mapping[str, str]) -> ActionReport:
        check_known(parameters, _FIELDS[action])
        topic = named(self._descriptions(), parameters.get("topic", "").strip()).topic
        target = parameters.get("target", "").strip() or None
        if action not in ("pause", "resume"):
            return self._on_message(action, topic, target, parameters)
        if action == "pause":
            after = lifecycle.pause(self._admin, topic, target, self._clock)
        else:
            try:
                spread_ms = duration_ms(parse_duration(parameters.get("spread", "0s")))
            except ValueError as error:
                raise InvalidInputError(f"spread: {error}") from None
            after = lifecycle.resume(self._admin, topic, target, self._clock, spread_ms)
        rows = [
            {"target": "all targets" if name == ALL else name, "paused_since_ms": since}
            for name, since in after.pauses.paused
        ]
        state = "Paused: what is due waits" if rows else "Nothing is paused: what waits is released"
        return ActionReport(200, f"{state}. Dispatchers see it within five seconds.", rows)

    def _on_message(
        self, action: str, topic: str, target: str | None, parameters: Mapping[str, str]
    ) -> ActionReport:
        """Find one message, and change it."""
        named = {name: parameters[name] for name in ("id", "key", "receipt") if name in parameters}
        if len(named) != 1:
            raise InvalidInputError(f"name one message, with {' or '.join(_FIELDS[action][2:])}")
        with self._open_inspector(topic, target=target, tell=_time_limit()) as look:
            check_cancellable(look.description, has_admin=True)
            if "receipt" in named:
                chosen = [changes.named_by_receipt(look.description, named["receipt"])]
            else:
                selection = Selection(id=named.get("id"), key=named.get("key"))
                rows = changes.pending_rows(look, selection)
                chosen, held = changes.receipts_of(look.description, rows)
                # A held copy cannot be changed, so a person decides about the other one.
                if action == "find" or len(chosen) != 1 or held:
                    return _choice(action, look.description, rows)
            change = changes.cancel if action == "cancel" else changes.fire
            notes: list[str] = []
            (one,) = changes.change_messages(
                self._open_client, look, chosen, change, OUTCOME_S, notes.append
            )
        outcome = one.view["outcome"]
        text = f"The outcome is {outcome!r}"
        if one.new is not None:
            text = f"The message is due now, and the outcome of its old copy is {outcome!r}"
        if not one.done and one.view["reason"]:
            text += f": {one.view['reason']}"
        status = 200 if one.done else 503 if outcome == "unconfirmed" else 409
        return ActionReport(status, " ".join((f"{text}.", *notes)), [one.view])


def _time_limit() -> Callable[[int], None]:
    """Return a function that a read calls, and that ends the read after some time."""
    until_s = time.monotonic() + _SEARCH_S

    def tell(messages: int) -> None:
        if time.monotonic() > until_s:
            raise QueryRefusedError(
                f"the search took more than {_SEARCH_S:.0f} s: give the receipt, or use "
                "`delaylevel pending cancel`; nothing was changed",
                503,
            )

    return tell


def _choice(
    action: str, description: LevelTopicDescription, rows: Sequence[PendingRow]
) -> ActionReport:
    """Return messages that match, each with its receipt unless it is held."""
    messages = first_copies(rows)
    if not messages:
        return ActionReport(404, "No pending message matches.")
    views: list[dict[str, Any]] = []
    for row in messages[:_SHOWN]:
        view = {name: getattr(row, name) for name in _VIEW}
        receipts, _ = changes.receipts_of(description, [row])
        view |= {"receipt": str(receipts[0])} if receipts else {"held": "it cannot be changed"}
        views.append(view)
    count = f"{len(messages):,} message{'s' * (len(messages) > 1)}"
    if action == "find":
        return ActionReport(200, f"{count} found.", views)
    return ActionReport(409, f"{count} found, and nothing changed: name one that waits.", views)
