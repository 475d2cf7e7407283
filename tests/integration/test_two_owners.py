"""Two owners of a journal at the same time: the broker accepts both, and one of them counts."""

from __future__ import annotations

import contextlib
import threading
from contextlib import closing
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.reader import messages_in_range
from delaylevel.dispatcher.assignment import window_sources
from delaylevel.dispatcher.journal.records import LowWatermark, decode
from delaylevel.dispatcher.journal.topic import Journal, counting
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.position import EARLIEST, Position
from support.dispatch_world import LEVELS
from support.world import QUIET, RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]
ROUNDS = 30
RECORDS = 5


def test_what_two_owners_do_at_once_is_what_the_journal_says(
    world: RealWorld, connection: Connection
) -> None:
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    _, source = window_sources(description, 0)
    acted: list[int] = []
    no_lock: Any = None
    both = 0
    with contextlib.ExitStack() as opened:
        clients = [pulsar.Client(**connection.client_kwargs(), logger=QUIET) for _ in range(2)]
        for client in clients:
            opened.callback(client.close)

        def own(number: int, barrier: threading.Barrier, confirmed: list[int]) -> None:
            barrier.wait()
            with contextlib.suppress(BrokerError):
                journal = Journal(clients[number % 2], world.admin, source, no_lock)
                opened.callback(journal.close)
                for _ in journal.read():
                    pass
                journal.claim()
                for index in range(RECORDS):
                    journal.append(LowWatermark(number * RECORDS + index + 1))
                    confirmed.append(number * RECORDS + index + 1)

        for number in range(0, 2 * ROUNDS, 2):
            barrier, confirmed = threading.Barrier(2), ([], [])  # type: ignore[var-annotated]
            threads = [
                threading.Thread(target=own, args=(number + each, barrier, confirmed[each]))
                for each in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            acted += sorted((*confirmed[0], *confirmed[1]))
            both += bool(confirmed[0] and confirmed[1])
        last = world.admin.last_message_id(source.name)
        assert last is not None
        found = messages_in_range(world.plain_client, source.topic, EARLIEST, last.next_entry)
        with closing(found):
            entries = [(each.data(), Position(*at)) for each, *at in found]
    records = [decode(data) for data in counting(entries)]
    print(
        f"{both} of {ROUNDS} rounds with records of two owners; "
        f"{len(records)} records of {len(entries)} entries count, {len(acted)} were confirmed"
    )
    values = [each.position for each in records if isinstance(each, LowWatermark)]
    assert len(set(values)) == len(values)
    assert set(acted) <= set(values), "nothing was done that the next owner does not read"


def test_an_owner_goes_on_in_a_new_ledger(world: RealWorld) -> None:
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    _, source = window_sources(description, 0)
    no_lock: Any = None
    with closing(Journal(world.plain_client, world.admin, source, no_lock)) as journal:
        assert not list(journal.read())
        journal.claim()
        for number in range(1, 7):
            journal.append(LowWatermark(number))
            if number == 3:
                world.admin.unload(source.name)
        assert journal.stored == 6
        records = [decode(data) for data in journal.read()]
    assert records == [LowWatermark(number) for number in range(1, 7)]
    last = world.admin.last_message_id(source.name)
    assert last is not None
    assert last.entry < 6, "it is in a new ledger"
