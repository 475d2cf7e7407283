"""Tests of faults during a send: only stored messages are reported as stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from delaylevel.cluster.rest.admin import Admin
from support.publisher_faults import MESSAGES, Outlet, messages, stored
from support.world import quiet_client


def test_a_broker_killed_during_a_send(private_broker: Callable[..., Any]) -> None:
    broker = private_broker()
    with closing(quiet_client(broker.connection)) as client:
        outlet = Outlet(client, "persistent://public/default/out")
        with closing(outlet.own):
            outlet.send(*messages(0, MESSAGES))
            assert broker.kill()
            outlet.send(*messages(MESSAGES, MESSAGES))
            broker.start()
            outlet.send(*messages(2 * MESSAGES, MESSAGES))
            outlet.settle()
            outlet.send(*messages(3 * MESSAGES, MESSAGES))
            outlet.settle()
        with Admin.from_connection(broker.connection) as admin:
            found = stored(client, admin, outlet.topic)
        assert outlet.confirmed <= found
        assert {str(number) for number in range(3 * MESSAGES, 4 * MESSAGES)} <= outlet.confirmed
