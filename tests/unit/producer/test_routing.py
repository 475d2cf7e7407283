"""Tests of the options of a message that a producer refuses, with remedies.

Routes are in the vectors of the wire format.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from delaylevel.errors import (
    DelayTooLongError,
    InvalidDelayError,
    InvalidInputError,
    UnsupportedOptionError,
)
from delaylevel.model.level_topic import FinalWindow
from delaylevel.producer.checks import Message
from delaylevel.producer.routing import Route, Routing
from delaylevel.testing import ManualClock
from support.fakes import describe

PARKED = {"deliver_after": timedelta(days=2)}
UNPARKABLE = {"sequence_id": 7, "replication_clusters": ["a"], "disable_replication": True}


def route(**arguments: Any) -> Route:
    description = describe(365, final_window=FinalWindow.BROKER)
    routing = Routing(description, description.targets[0], None, ManualClock(1_800_000_000_000))
    return routing.route(Message(b"", **arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"deliver_at": datetime(2027, 2, 1)}, InvalidDelayError, "naive"),
        (
            {"deliver_after": timedelta(days=365, milliseconds=1)},
            DelayTooLongError,
            "365d1ms.*365d.*maximum_delay.*recirculate.*not sent",
        ),
        ({"message_id": "", **PARKED}, InvalidInputError, "1 to 512"),
        ({"message_id": "x" * 513}, InvalidInputError, "513"),
        ({"message_id": 7}, InvalidInputError, "a string, not int: 7"),
        (
            {**PARKED, "sequence_id": 7},
            UnsupportedOptionError,
            "sequence_id=7.*message_id=.*not sent",
        ),
        (
            {**PARKED, "replication_clusters": ["a"]},
            UnsupportedOptionError,
            r"replication_clusters=\['a'\].*business topic.*not sent",
        ),
        (
            {**PARKED, "disable_replication": True},
            UnsupportedOptionError,
            "disable_replication=True.*not sent",
        ),
    ],
)
def test_invalid_options_are_refused_with_a_remedy(
    arguments: dict[str, Any], error: type[InvalidInputError], said: str
) -> None:
    with pytest.raises(error, match=said):
        route(**arguments)


def test_options_without_effect_are_accepted_if_nothing_is_parked() -> None:
    assert set(UNPARKABLE) == set(Message().not_parkable)
    assert not route(**UNPARKABLE, deliver_after=timedelta(minutes=1)).parked
    assert not route(**UNPARKABLE).parked
    assert route(**PARKED, **dict.fromkeys(UNPARKABLE)).parked
