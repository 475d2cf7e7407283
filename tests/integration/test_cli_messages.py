"""``levels create`` and ``send`` on the command line, up to the consumer."""

from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

from delaylevel.model.level_topic import default_level_topic
from delaylevel.topics.registry import describe
from support.world import RealWorld

UNITS = ("--unit", "200ms", "--max-delay", "2s", "--final-window", "broker")


def test_from_the_first_command_to_the_consumer(
    invoke: Callable[..., Result], world: RealWorld
) -> None:
    orders = world.topic("orders")
    made = invoke("levels", "create", orders, *UNITS, "-o", "json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["topic"] == default_level_topic(orders)
    get = world.arrivals(orders)
    sent = invoke(
        *("send", orders, "pay me", "--after", "1s", "--key", "k", "--ordering-key", "o"),
        *("--property", "a=1", "--property", "b=x=y", "--event-time", "2020-01-01T00:00:00Z"),
        *("--id", "mine", "-o", "json"),
    )
    assert sent.exit_code == 0, sent.stderr
    answer = json.loads(sent.stdout)
    assert (answer["outcome"], answer["id"], answer["target"]) == ("stored", "mine", orders)
    (message,) = world.stored(default_level_topic(orders))
    assert f"({message.ledger},{message.entry}," in answer["message_id"]
    # The result shows the stored due time, not one from a second look at the clock.
    assert answer["due_ms"] == int(message.properties["delaylevel.due"])

    listed = invoke("levels", "list", orders.removeprefix("persistent://").rpartition("/")[0])
    assert listed.exit_code == 0
    assert "orders-delay-level" in listed.stdout
    assert invoke("levels", "describe", orders).exit_code == 0

    moving = world.mover(describe(world.admin, orders))

    def handed_off() -> int:
        report = moving.run_once()
        return report.window + report.due

    world.eventually(handed_off, "the hand-off")
    (arrival,) = get(1)
    message = arrival.message
    assert message.data() == b"pay me"
    assert (message.partition_key(), message.ordering_key()) == ("k", "o")
    assert message.event_timestamp() == 1_577_836_800_000
    assert message.properties() == {
        "a": "1",
        "b": "x=y",
        "delaylevel.id": "mine",
        "delaylevel.due": str(answer["due_ms"]),
        "delaylevel.target": orders,
    }
