"""Tests of dispatchers that are suspended, or that no admin interface answers."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from delaylevel import DelayLevelClient
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import DispatchSettings
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.outcome import PAYLOAD, Outcome
from delaylevel.model.topic_name import TopicName
from delaylevel.run import LocalService
from delaylevel.topics.status import window_stats
from support.background import Serving
from support.processes import ALO, EO, UNIT, Arrivals, DispatchWorld, at, create, ids, now_ms
from support.proxy import Proxy
from support.world import QUIET, RealWorld, eventually, quiet_client

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

# Not one timeout of the admin interface (30 s): a service gives up a read after 4 s, and a target
# that was open before is opened after 1.5 s.
LATE_MS = 12_000  # as late as a busy machine is
# A takeover waits for some seconds until an address is given up, and not for 30 s.
TAKEOVER_MS = 20_000


def test_what_was_cancelled_is_not_released_by_a_client_that_still_sends(
    world: RealWorld, cli_process: Callable[..., Any]
) -> None:
    """The client of a suspended dispatcher has sent messages that the broker has not read.

    It sends them again when it goes on, and nobody else uses the name of its producer then. The
    broker takes them if no higher sequence ID came.
    """
    world.deduplicate()
    race = DispatchWorld(world, cli_process, EO, "orders", window_partitions=2)
    race.throttle(race.target, 1)
    first = race.start()
    world.eventually(lambda: race.owners() == {first.pid}, "both partitions")
    # What is due 5 s after the first record is never cancelled.
    due = at(now_ms() + 7_000, ids("m", 1_500))
    race.publish(race.target, due, b"large" * 800)
    world.eventually(lambda: race.stored(race.target), "the first message")
    first.send_signal(signal.SIGSTOP)
    race.publish(race.target, due, PAYLOAD, **{env.KIND: env.CANCEL})
    second = race.start()
    world.eventually(lambda: race.owners() == {second.pid}, "a takeover")
    race.unthrottle(race.target)
    outcomes: dict[str, set[str]] = defaultdict(set)

    def decided() -> bool:
        for message in world.stored(race.description.outcomes_topic.full):
            outcome = Outcome.read(message.properties)
            outcomes[outcome.id].add(outcome.status.value)
        return outcomes.keys() == due.keys()

    world.eventually(decided, "all outcomes", 120)
    name = TopicName.parse(race.target)
    stats = world.admin.partition_stats
    world.eventually(lambda: not stats(name).publishers, "no producer of the target")
    first.send_signal(signal.SIGCONT)
    world.eventually(lambda: first.pid in race.owners(), "a share of the first one")
    released = race.stored(race.target)
    assert decided()
    assert max(released.values()) == 1
    for name in due:
        assert outcomes[name] == ({"too late"} if name in released else {"cancelled"}), name


@pytest.fixture
def web(connection: Connection) -> Iterator[Proxy]:
    """A proxy in front of the only admin address that anybody knows."""
    with contextlib.closing(Proxy.before(str(connection.admin_url))) as proxy:
        yield proxy


@pytest.mark.parametrize("delivery", list(Delivery))
@pytest.mark.parametrize("fault", ["cut", "hold"])
def test_messages_arrive_without_the_admin_interface(
    world: RealWorld,
    connection: Connection,
    web: Proxy,
    tmp_path: Path,
    fault: str,
    delivery: Delivery,
) -> None:
    if delivery is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    description = create(world)
    (orders,) = description.targets
    partitions = {description.window_partition(f"customer-{number}", "") for number in range(12)}
    assert len(partitions) == description.window_partitions
    consumer = world.plain_client.subscribe(orders, "application")
    admin = Admin(f"http://127.0.0.1:{web.port}", for_service=True)
    settings = DispatchSettings(directory=tmp_path / "spill", delivery=delivery, checkpoint_ms=200)
    service = LocalService(lambda: quiet_client(connection), admin, (description.topic,), settings)
    client = DelayLevelClient(**connection.client_kwargs(), admin=admin, logger=QUIET)
    producer = client.create_producer(orders, enable_delay_level_topic=True)

    def deliver(round_name: str) -> None:
        """Send messages with all delays, and receive each once, on time."""
        sent = {b"%s %d" % (round_name.encode(), number) for number in range(12)}
        for number, body in enumerate(sorted(sent)):
            # With these keys, each window partition gets some: each opens the target by itself.
            key = f"customer-{number}"
            delay = UNIT * (0.3 + number * 0.3)
            producer.send_async(body, None, partition_key=key, deliver_after=delay)
        producer.flush()
        while sent:
            message = consumer.receive(60_000)
            late_ms = time.time() * 1000 - int(message.properties()["delaylevel.due"])
            sent.remove(message.data())
            assert -1 < late_ms < LATE_MS, (round_name, late_ms)
            consumer.acknowledge(message)

    def producers() -> int:
        return len(world.admin.partition_stats(world.name("orders")).publishers)

    others = producers()
    with Serving(service):
        deliver("before")
        # An idle target is closed, and has to be opened again.
        eventually(lambda: producers() == others, "the end of the dispatcher's producers")
        getattr(web, fault)()
        deliver("first")
        eventually(lambda: producers() == others, "the end of the dispatcher's producers")
        deliver("second")
        (stats,) = service.movers.stats().values()
        assert (stats.state, stats.failures) == ("moving", 0)
        web.restore()
        deliver("after")
    client.shutdown()
    admin.close()


def test_a_takeover_does_not_wait_long_for_an_address_that_hangs(
    world: RealWorld,
    connection: Connection,
    web: Proxy,
    cli_process: Callable[..., Any],
    environment: dict[str, str],
) -> None:
    both = f"http://127.0.0.1:{web.port},{urlsplit(str(connection.admin_url)).netloc}"
    proxied = partial(cli_process, env={**environment, "DELAYLEVEL_ADMIN_URL": both})
    setting = DispatchWorld(world, proxied, ALO, "orders", window_partitions=2)
    processes = [setting.start(), setting.start()]
    names = ids("m", 100)
    arrivals = Arrivals(world, setting.target)
    setting.publish(setting.target, at(now_ms() + 3_000, names, step_ms=100))
    world.eventually(lambda: len(arrivals.copies) > 10, "the first messages")
    web.hold()
    owner = window_stats(world.admin, setting.description)[0].owner
    assert owner is not None
    (killed,) = [each for each in processes if owner.name.endswith(f":{each.pid}")]
    killed.kill()
    world.eventually(lambda: len(arrivals.copies) == len(names), "all messages", 120)
    print(f"worst lateness {max(arrivals.late_ms)} ms")
    assert set(arrivals.copies) == set(names)
    assert max(arrivals.late_ms) < TAKEOVER_MS
