"""Tests of roles with the rights in docs/security.md, and of their tokens, which nothing shows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
from click.testing import CliRunner

from delaylevel import topics
from delaylevel.cli.main import cli
from delaylevel.cluster.rest.admin import Admin
from delaylevel.consumer import Deduplication, Listeners, TopicIdStore
from delaylevel.consumer.retry_topics import RetryTopics, prepare
from delaylevel.errors import NotFoundError, PermissionDeniedError
from delaylevel.model.level_topic import Role
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient
from support.background import Serving, serving_movers
from support.pages import ROOT
from support.tokens import command_lines, tokens_in
from support.world import QUIET, eventually

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]


def test_actions_without_a_grant_are_refused(roles: Any) -> None:
    """The grants with which the other tests work matter."""
    description, target = roles.description, roles.description.targets[0]
    level = description.name.partition(0).full
    window = description.window_topic.partition(0).full
    for role, topic in (("mover", target), ("application", level), ("application", window)):
        with roles.clients(role) as (client,), pytest.raises(pulsar.PulsarException):
            client.create_producer(topic)
    for role, topic in (("sender", level), ("application", level), ("dispatcher", level)):
        with roles.clients(role) as (client,), pytest.raises(pulsar.PulsarException):
            client.subscribe(topic, "spy")
    for role in roles.documented:
        with Admin.from_connection(roles.load(role)) as admin:
            with pytest.raises(PermissionDeniedError) as refused:
                admin.delete(description.name)
            assert roles.secured.token_of(role) not in str(refused.value)
    application = Admin.from_connection(roles.load("application"))
    with application, pytest.raises(PermissionDeniedError):
        topics.find(application, description.topic)


def test_a_programs_token_is_in_no_process_list_log_or_error(
    roles: Any, cli_process: Callable[..., Any]
) -> None:
    """No token is in a process list, in a log at its most verbose level or in an error."""
    secured, topic = roles.secured, roles.description.topic
    where = ["-vv", *secured.words()]
    for token, well in ((secured.token, True), (secured.foreign_token, False)):
        environment = {**os.environ, "DELAYLEVEL_TOKEN": token}
        started = [
            cli_process(*where, *words, env=environment)
            for words in (
                ("levels", "describe", topic),
                ("doctor", topic),
                ("dispatcher", "run", topic),
                ("send", roles.description.targets[0], "x", "--after", "1s"),
            )
        ]
        last = started[2]
        texts = [item for each in started for item in command_lines(each.pid).items()]
        if well:
            eventually(lambda: roles.status().consumers(Role.WINDOW), "the dispatcher")
            last.terminate()
        # The findings of the doctor do not matter here: no mover runs.
        codes = [each.wait(60) for each in started]
        assert [codes[0], codes[2], codes[3]] == ([0, 0, 0] if well else [1, 1, 1])
        for each in started:
            said = each.log.read_bytes() + each.log.with_suffix(".out").read_bytes()
            assert said
            texts.append((str(each.log), said))
        assert tokens_in([token], texts) == []


def test_admin_of_the_tenant_may_use_a_namespace_of_its_own_and_others_are_told_who_may(
    secured: Any,
) -> None:
    tenant = f"acme-{secrets.token_hex(4)}"
    with Admin.from_connection(secured.load(token=secured.token)) as owner:
        owner._rest.put(
            f"tenants/{tenant}", {"adminRoles": ["keeper"], "allowedClusters": ["standalone"]}
        )
        for name in ("business", "levels"):
            owner._rest.put(f"namespaces/{tenant}/{name}")
        owner._rest.post(f"namespaces/{tenant}/business/permissions/app", ["produce"])

    def client(role: str) -> DelayLevelClient:
        connection = secured.load(token=secured.token_of(role))
        return DelayLevelClient.from_connection(connection, logger=QUIET)

    def create(made: DelayLevelClient, namespace: str | None = f"{tenant}/levels") -> Any:
        return made.create_producer(
            f"persistent://{tenant}/business/orders",
            enable_delay_level_topic=True,
            delay_level_namespace=namespace,
        )

    with contextlib.closing(client("app")) as app, contextlib.closing(client("keeper")) as keeper:
        with pytest.raises(PermissionDeniedError, match=f"--level-namespace {tenant}/levels"):
            create(app)
        create(keeper).close()
        with pytest.raises(PermissionDeniedError, match="admin of the tenant"):
            create(keeper, "public/default")
        with pytest.raises(NotFoundError, match=f"namespaces create {tenant}/missing"):
            create(keeper, f"{tenant}/missing")
        with pytest.raises(PermissionDeniedError, match="admin of the tenant"):
            create(app, None)
        # With grants on its topics, the level topic in the other namespace is found.
        with Admin.from_connection(secured.load(token=secured.token)) as owner:
            owner._rest.post(f"namespaces/{tenant}/levels/permissions/app", ["produce"])
        with create(app) as producer:
            producer.send(b"later", deliver_after=timedelta(days=3))
        with Admin.from_connection(secured.load(token=secured.token_of("keeper"))) as admin:
            found = topics.describe(admin, f"{tenant}/business/orders", search=True)
        assert found.topic == f"persistent://{tenant}/levels/_{tenant}.business.orders-delay-level"


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
