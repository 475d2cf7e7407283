"""Fixtures for tests of targets that are deleted, refuse, hang or are slow.

Dispatchers run as processes. The tests look only at topics: what a target, the held topic and the
dead-letter topic hold in the end, and when it came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.model.delivery import Delivery
from support.dispatch_world import Arrivals, DispatchWorld, MakeDispatch, MakePair, Pair
from support.world import RealWorld


@pytest.fixture
def connection(broker_with: Callable[..., EmbeddedBroker]) -> Any:
    """The address of a broker that checks backlog quotas every second."""
    broker = broker_with({"backlogQuotaCheckIntervalInSeconds": 1})
    return broker.connection.model_copy(update={"operation_timeout_seconds": 60})


@pytest.fixture(autouse=True)
def no_retention(world: RealWorld) -> None:
    """Keep nothing of topics without subscriptions, as brokers do by default."""
    world.keep_nothing()


@pytest.fixture
def make(world: RealWorld, cli_process: Callable[..., Any]) -> MakeDispatch:
    """``make(delivery, "orders", "bad", **description)``: a level topic with these targets."""
    return partial(DispatchWorld, world, cli_process)


@pytest.fixture
def arrivals(connection: Any) -> Iterator[Callable[..., Arrivals]]:
    """``arrivals(topic)``: subscribe to a topic, and record what comes and how late it is."""
    with contextlib.ExitStack() as stack:

        def subscribe(topic: str, **options: Any) -> Arrivals:
            made = Arrivals(connection, topic, **options)
            stack.callback(made.close)
            return made

        yield subscribe


@pytest.fixture
def pair(make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery) -> MakePair:
    """``pair(**description)``: a level topic with the targets ``orders`` and ``bad``."""

    def made(**values: Any) -> Pair:
        setting = make(delivery, "orders", "bad", **values)
        return Pair(setting, arrivals(setting.targets[0]))

    return made
