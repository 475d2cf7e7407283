"""Producer options that a level topic can keep, and the settings derived from them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from delaylevel.cluster.publisher import OWN_SEQUENCE_SETTINGS
from delaylevel.errors import InvalidInputError, UnsupportedOptionError
from delaylevel.model.delivery import LARGEST_BATCH
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import LevelTopicDescription, Mover

from .size_limit import SMALLEST_MAX_MESSAGE_SIZE

_SHORTEST_SEND_TIMEOUT_MS = 5000
_LONGEST_SEND_TIMEOUT_MS = 30_000

_REFUSED = {
    "encryption_key": "a mover would have to decrypt every message and encrypt it again",
    "crypto_key_reader": "a mover would have to decrypt every message and encrypt it again",
    "chunking_enabled": "a mover reads whole messages; keep bodies below the broker's limit",
    "message_router": "a mover cannot call it; give a partition_key and the hash decides, "
    "the same for delayed and undelayed messages",
}
_KEPT = (
    "compression_type",
    "max_pending_messages",
    "block_if_queue_full",
    "batching_max_publish_delay_ms",
    "batching_max_allowed_size_in_bytes",
    "properties",
)


def given_options(
    function: Any,
    topic: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    ours: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the arguments that were passed to ``create_producer`` by name, without the topic.

    Args:
        function: the plain client's method.
        ours: names of our own arguments, which a misspelt name may mean.

    Raises:
        TypeError: an argument is unknown; the text tells the nearest name.
    """
    signature = inspect.signature(function)
    own = list(signature.parameters)[2:]
    for name in kwargs:
        if name not in signature.parameters:
            near = difflib.get_close_matches(name, [*own, *ours], n=1)
            hint = f": did you mean {near[0]!r}?" if near else f"; the options are {', '.join(own)}"
            raise TypeError(f"create_producer has no argument {name!r}{hint}")
    bound = signature.bind_partial(None, topic, *args, **kwargs)
    return {name: bound.arguments[name] for name in list(bound.arguments)[2:]}


def check_producer_options(options: Mapping[str, Any]) -> None:
    """Refuse given options of ``create_producer`` that would not affect delayed messages.

    Raises:
        UnsupportedOptionError: an option is refused; the text names the reason and the remedy.
    """
    for name, reason in _REFUSED.items():
        if options.get(name):
            raise UnsupportedOptionError(
                f"{name} cannot be combined with a delay-level topic: {reason}"
            )
    access_mode = options.get("access_mode")
    if access_mode is not None and str(access_mode).rpartition(".")[2] != "Shared":
        raise UnsupportedOptionError(
            f"access_mode {access_mode} would lock out the mover (or dispatcher), which publishes "
            "due messages to the same topic: use Shared"
        )


def check_max_message_size(max_message_size: int) -> None:
    """Raise InvalidInputError for an unusable ``max_message_size``."""
    if type(max_message_size) is not int or max_message_size < SMALLEST_MAX_MESSAGE_SIZE:
        raise InvalidInputError(
            f"max_message_size={max_message_size!r} is not a limit for messages: give the broker's "
            f"maxMessageSize, a number of bytes from {SMALLEST_MAX_MESSAGE_SIZE} up"
        )


def level_producer_settings(
    options: Mapping[str, Any], description: LevelTopicDescription
) -> tuple[dict[str, Any], str | None]:
    """Return the arguments for producers of level topics, derived from the application's own.

    With a warning for the application, or None.

    Raises:
        UnsupportedOptionError: the send timeout is 0 or negative.
    """
    settings: dict[str, Any] = {name: options[name] for name in _KEPT if name in options}
    settings |= OWN_SEQUENCE_SETTINGS
    # The broker delays the messages of a Function's levels one by one, so they are not batched.
    settings["batching_enabled"] = description.mover is Mover.SPARK and _batches(options)
    settings["batching_max_messages"] = min(
        int(options.get("batching_max_messages", 1000)), LARGEST_BATCH
    )
    lead_ms = description.levels.smallest_lead_ms
    timeout_ms = options.get("send_timeout_millis")
    warning = None
    if timeout_ms is None:
        timeout_ms = min(max(lead_ms, _SHORTEST_SEND_TIMEOUT_MS), _LONGEST_SEND_TIMEOUT_MS)
    elif timeout_ms <= 0:
        raise UnsupportedOptionError(
            f"send_timeout_millis={timeout_ms} cannot be combined with a delay-level topic: a "
            "message that waits in the client without a limit ends up behind younger ones in its "
            "partition and is handed off too late; set it to at most the lead "
            f"({exact_duration(lead_ms)})"
        )
    elif timeout_ms > lead_ms:
        warning = (
            f"send_timeout_millis={timeout_ms} is above the lead of the level topic "
            f"({exact_duration(lead_ms)}): a message that waits in the client for longer than the "
            "lead can be handed off late"
        )
    settings["send_timeout_millis"] = timeout_ms
    return settings, warning


def window_producer_settings(
    level_settings: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments for producers of the window topic, derived from those of the levels.

    The broker delays nothing in the window topic, so batches are possible with a Function, too.

    Args:
        level_settings: the arguments for producers of levels.
        options: the application's own arguments, by name.
    """
    return {**level_settings, "batching_enabled": _batches(options or {})}


def _batches(options: Mapping[str, Any]) -> bool:
    """Return True unless the application turned batches off; the default is to batch."""
    return bool(options.get("batching_enabled", True))
