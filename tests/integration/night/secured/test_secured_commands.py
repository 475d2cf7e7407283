"""Tests of the rights of a listener, of `run`, and of commands that look at messages or act."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from delaylevel.cli.main import cli
from delaylevel.consumer import Deduplication, Listeners, TopicIdStore
from delaylevel.consumer.retry_topics import RetryTopics, prepare
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.background import Serving, serving_movers
from support.pages import ROOT
from support.world import eventually

pytestmark = pytest.mark.broker


@pytest.fixture
def served(roles: Any, tmp_path: Path) -> Iterator[None]:
    """A mover and a dispatcher for the level topic, each with its own role."""
    with (
        roles.clients("mover") as (client,),
        roles.admin("mover") as admin,
        serving_movers(client, admin, roles.description.topic),
        roles.dispatching(tmp_path),
    ):
        yield


def test_a_listener_needs_its_own_topics_only(roles: Any, served: None) -> None:
    target, handled = roles.target, []
    text = " ".join((ROOT / "docs" / "security.md").read_text().split())
    own_topics = dict(re.findall(r"`…-(\w+)`: (consume, produce)", text))
    assert own_topics.keys() == {"RETRY", "DLQ", "handled"}
    with roles.owner() as owner:
        retry = prepare(owner, RetryTopics.of(target, "billing")).targets[-1]
        owner.create_partitioned(TopicName.parse(f"{target}-billing-handled"), 1)
        for suffix, actions in own_topics.items():
            topic = TopicName.parse(f"{target}-billing-{suffix}")
            roles.grant_on(owner, topic, "listener", actions)
        # It is a target of the level topic.
        roles.grant_on(owner, TopicName.parse(retry), "dispatcher", "produce")
    with roles.clients("listener", "sender") as (client, sender):
        app = Listeners(client)

        @app.on(
            target,
            subscription="billing",
            initial_position="earliest",
            retry=["1s"],
            deduplicate=Deduplication(store=TopicIdStore()),
        )
        def bill(message: Any) -> None:
            handled.append((message.data, message.attempt))
            if message.data == b"bad" or message.attempt == 1:
                raise ConnectionError("the bank does not answer")

        with Serving(app):
            producer = sender.create_producer(target)
            producer.send(b"good")
            producer.send(b"bad")
            wanted = {(body, attempt) for body in (b"good", b"bad") for attempt in (1, 2)}
            eventually(lambda: set(handled) == wanted, "two attempts of each", seconds=90)
            (stats,) = [each.stats for each in app.listeners]
            eventually(lambda: stats.counts().dead == 1, "the dead letter", seconds=60)
    assert len(handled) == len(wanted)


def test_looking_and_acting_need_what_the_page_says(
    make_roles: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("duckdb")
    roles = make_roles(Levels(PartitionStrategy(maximum_delay=timedelta(days=5))))
    roles.grant("sender", "looking", "acting")

    def run(role: str, *words: str) -> Any:
        token = tmp_path / f"{role}.token"
        token.write_text(roles.secured.token_of(role))
        where = [*roles.secured.words(), "--token-file", str(token)]
        return CliRunner().invoke(cli, [*where, *words])

    def ids(role: str) -> set[str]:
        done = run(role, "pending", "list", roles.target, "-o", "jsonl")
        assert done.exit_code == 0, done.output
        return {json.loads(line)["id"] for line in done.stdout.splitlines()}

    with roles.clients("sender") as (sender,):
        producer = sender.create_producer(roles.target, enable_delay_level_topic=True)
        for name in ("first", "second", "third"):
            producer.send(b"x", deliver_after=timedelta(days=3), message_id=name)
        producer.close()
    assert ids("looking") == {"first", "second", "third"}
    done = run("looking", "horizon", roles.target)
    assert (done.exit_code, "3 pending" in done.output) == (0, True), done.output
    assert run("looking", "pending", "cancel", roles.target, "--id", "first").exit_code == 1
    assert ids("looking") == {"first", "second", "third"}
    for words in (
        ("cancel", roles.target, "--id", "first"),
        ("reschedule", roles.target, "--id", "second", "--at", "+4d"),
        ("fire", roles.target, "--id", "third"),
    ):
        done = run("acting", "pending", *words)
        assert (done.exit_code, "accepted" in done.output) == (0, True), done.output
    assert not {"first", "second", "third"} & ids("acting")
    done = run("acting", "pending", "outcome", roles.target)
    assert done.exit_code == 0, done.output


def test_run_and_a_producer_that_waits_need_what_the_page_says(
    make_roles: Callable[..., Any],
    arrivals: Callable[..., Any],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    unit = timedelta(seconds=2)
    roles = make_roles(Levels(PartitionStrategy(partition_by=unit, maximum_delay=4 * unit)))
    roles.grant("runner", "waiting", "application")
    token = tmp_path / "runner.token"
    token.write_text(roles.secured.token_of("runner"))
    where = [*roles.secured.words(), "--token-file", str(token)]
    service = cli_process(*where, "run", roles.description.topic)
    with roles.clients("application", "waiting") as (consuming, sending):
        consumer = arrivals(consuming, roles.target)
        producer = sending.create_producer(roles.target, enable_delay_level_topic=True)
        producer.send(b"released", deliver_after=3 * unit)
        eventually(lambda: consumer.has(b"released"), "the message", seconds=60)
        taken_back = producer.schedule(b"taken back", deliver_after=3 * unit)
        outcome = producer.cancel(taken_back, timeout=timedelta(seconds=30))
        assert outcome.status == "cancelled", outcome
        producer.send(b"last", deliver_after=3 * unit)
        eventually(lambda: consumer.has(b"last"), "the message", seconds=60)
        assert not consumer.has(b"taken back")
    service.terminate()
    assert service.wait(60) == 0
