"""Tests of the commands about level topics, on the in-memory Pulsar."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from click.testing import CliRunner

from delaylevel.cli import levels
from delaylevel.cli.main import cli
from delaylevel.errors import AdminError, BrokerError, BrokerUnreachableError
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar


@pytest.mark.parametrize(
    "error",
    [
        AdminError("the bundle is loading", status=503),
        # Of several brokers, the one that has the topics of this level topic is away.
        BrokerUnreachableError("the broker at two:8080 is away", address="two:8080"),
    ],
)
def test_a_level_topic_whose_state_cannot_be_read_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, error: BrokerError
) -> None:
    with MemoryPulsar() as memory:
        for name in ("orders", "reminders"):
            memory.client().create_producer(name, enable_delay_level_topic=True)
        read = memory.admin.partitioned_stats

        def refused(topic: TopicName) -> Any:
            if "orders" in topic.full:
                raise error
            return read(topic)

        monkeypatch.setattr(memory.admin, "partitioned_stats", refused)
        monkeypatch.setattr(levels.Admin, "from_connection", lambda _: nullcontext(memory.admin))
        result = CliRunner().invoke(cli, ["levels", "list", "-o", "json"])
    assert result.exit_code == 0, result
    orders, reminders = json.loads(result.stdout)
    assert orders["problem"] == f"its state cannot be read: {error}"
    assert reminders["targets"] == ["persistent://public/default/reminders"]
