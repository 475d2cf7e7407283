"""A test of ``delaylevel run`` as a program: its HTTP service, a standby, and the end of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delaylevel.inspection import Inspector, Window
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.processes import UNIT, Owners, Start, address, answer, create, end, said
from support.world import RealWorld

pytestmark = pytest.mark.broker


def conditions(process: Any) -> dict[str, str]:
    """Return the conditions of readiness that are met, with their texts."""
    checks = json.loads(answer(process, "readyz")[1])["checks"]
    return {check["name"]: check["text"] for check in checks if check["ok"]}


def test_its_http_service_tells_of_mover_and_dispatcher(
    world: RealWorld, cli_process: Start
) -> None:
    longer = Levels([PartitionStrategy(partition_by=60 * UNIT, maximum_delay=480 * UNIT)])
    description = create(world, longer, window_partitions=2)
    (orders,) = description.targets
    topic = description.topic
    process = cli_process("run", orders, "--metrics-port", "0")
    world.eventually(lambda: answer(process, "readyz")[0] == 200, "readiness")
    assert Owners(world, description).all_with(process)
    met = conditions(process)
    assert met[f"mover lock of {topic}"] == "held"
    assert "the lead is" in met[f"hand-offs of {topic}"]
    assert met[f"partition locks of {topic}"] == "all 2 here"
    assert {f"caught up with {topic}", f"lag of {topic}"} < met.keys()
    assert answer(process, "healthz")[0] == 200

    later = world.clock.now_ms() + 60_000
    with world.producer(orders) as producer:
        producer.send(b"later", deliver_after=300 * UNIT)
        for number in range(3):
            producer.send(b"x" * number, deliver_after=40 * UNIT)
    assert json.loads(answer(process, "counts")[1])["level_topic"] == topic
    world.eventually(
        lambda: json.loads(answer(process, f"pending?to={later}")[1])["messages"] == 3,
        "messages in the window",
    )
    found = json.loads(answer(process, f"average?to={later}")[1])
    assert (found["messages"], found["mean"]) == (3, 1)
    moving = f'delaylevel_mover_state{{level_topic="{topic}",state="moving"}} 1.0'
    world.eventually(lambda: moving in answer(process, "metrics")[1], "the mover's state")
    assert "delaylevel_dispatch_window_messages" in answer(process, "metrics")[1]
    status, page = answer(process, "")
    assert status == 200
    assert page.count(f"<h2>{topic}</h2>") == 1
    assert "moving" in page
    assert "Window partitions" in page
    asked, read = (
        Inspector(world.plain_client, world.admin, orders, live=on) for on in (True, False)
    )
    assert asked.live is not None
    assert (len(list(asked.rows())), len(asked.live.ask(Window(), 1))) == (4, 2)
    assert (list(asked.rows()), asked.live.refusals) == (list(read.rows()), {})
    with world.serving(description) as serving:
        # As 127.0.0.1 of another machine would be.
        serving.dispatcher.advertise(address(process))
        world.eventually(serving.dispatcher.stats, "a share of another dispatcher")
        assert list(asked.rows()) == list(read.rows())
        assert asked.live.refusals

    second = cli_process("run", orders, "--metrics-port", "0")
    world.eventually(lambda: answer(second, "readyz")[0] == 200, "readiness of the standby")
    standby = conditions(second)[f"mover lock of {topic}"]
    assert standby.startswith("on standby: delaylevel-local@")
    assert f"hand-offs of {topic}" not in conditions(second)
    for each in (process, second):
        each.terminate()
        assert end(each) == 0, said(each)
    owners = Owners(world, description)
    assert (owners.mover(), owners.window()) == (0, {0})
