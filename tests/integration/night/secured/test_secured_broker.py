"""Tests of the rights of each role, and of what shows no token, on a broker with tokens and TLS."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import NotFoundError, PermissionDeniedError
from delaylevel.producer.client import DelayLevelClient
from support.leaks import command_lines, tokens_in
from support.world import QUIET, eventually


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
            eventually(lambda: roles.status().dispatchers, "the dispatcher")
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
