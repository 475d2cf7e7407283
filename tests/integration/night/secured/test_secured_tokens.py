"""Tests of tokens that expire, and of a prefix of subscriptions; a broker of their own.

Each grant updates all topics of a namespace, so one broker is too slow with those of all tests.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.doctor import State, examine
from delaylevel.errors import UnsafeNamespaceError
from delaylevel.model.level_topic import Role
from delaylevel.mover.local import LocalMover
from support.background import serving_movers
from support.tokens import tokens_in
from support.world import QUIET, eventually

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
PATIENCE_S = 120


@pytest.mark.parametrize("how", ["lapse", "spoil", "empty", "remove"])
def test_a_producer_and_a_dispatcher_survive_expired_tokens(
    how: str,
    roles: Any,
    renewed: Callable[..., Any],
    arrivals: Callable[..., Any],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """The tokens of the mover and of the application stay valid."""
    description = roles.description
    unit = timedelta(milliseconds=description.levels[0].unit_ms)
    files = {role: tmp_path / f"{role}.token" for role in ("sender", "dispatcher")}
    tokens = {role: renewed(roles.secured, role, file) for role, file in files.items()}
    for token in tokens.values():
        token.renew()
    with contextlib.ExitStack() as stack:
        client = roles.client("sender", token=None, token_file=files["sender"])
        stack.callback(client.close)
        moving, consuming = stack.enter_context(roles.clients("mover", "application"))
        admin = stack.enter_context(roles.admin("mover"))
        mover = stack.enter_context(closing(LocalMover(moving, admin, description)))
        consumer = arrivals(consuming, roles.target)
        words = [*roles.secured.words(), "--token-file", str(files["dispatcher"])]
        program = cli_process(*words, "dispatcher", "run", description.topic)
        producer = client.create_producer(roles.target, enable_delay_level_topic=True)

        def arrives(body: bytes) -> None:
            def has() -> bool:
                assert program.poll() is None, program.log.read_text()[-5000:]
                mover.run_once()
                return bool(consumer.has(body))

            eventually(has, f"{body!r}: {program.log.read_text()[-3000:]}", PATIENCE_S)

        producer.send(b"well", deliver_after=3 * unit)
        arrives(b"well")
        for token in tokens.values():
            getattr(token, how)()
        eventually(lambda: not producer.is_connected(), "the producer's disconnection", PATIENCE_S)
        eventually(
            lambda: not roles.status().consumers(Role.WINDOW), "the dispatcher's end", PATIENCE_S
        )
        sent: list[Any] = []
        producer.send_async(
            b"meanwhile", lambda result, _: sent.append(result), deliver_after=3 * unit
        )
        for token in tokens.values():
            token.renew()
        producer.send(b"again", deliver_after=3 * unit)
        arrives(b"again")
        arrives(b"meanwhile")
        assert [str(result) for result in sent] == ["Result.Ok"]
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 0
    assert all(len(ids) == 1 for ids in consumer.ids.values())
    said = program.log.read_bytes() + program.log.with_suffix(".out").read_bytes()
    given = [token for file in tokens.values() for token in file.given]
    assert tokens_in(given, [("the program's output", said)]) == []


def not_opened(roles: Any) -> set[str]:
    """Return the kinds of what the mover's role may not open of the levels."""
    found = {item.check: item for item in examine(roles.load("mover"), roles.description.topic)}
    says = [each.says for each in found["openings"].warnings]
    return {line.split()[6] for line in says if "-delay-level-partition" in line}


def test_a_prefix_of_subscriptions_is_refused_reported_and_survived(roles: Any) -> None:
    description, mode = roles.description, "namespaces/public/default/subscriptionAuthMode"
    with roles.client("sender") as client:
        producer = client.create_producer(roles.target, enable_delay_level_topic=True)
        producer.send(b"x", deliver_after=timedelta(seconds=2))
    with roles.owner() as owner, closing(roles.load("mover").open_client(logger=QUIET)) as client:
        owner._rest.post(mode, "Prefix")
        another = replace(description, topic=f"{description.topic}-more")
        with pytest.raises(UnsafeNamespaceError, match="set-subscription-auth-mode"):
            topics.create(owner, another)
        assert not owner.topic_exists(another.name)
        with serving_movers(client, roles.admin("mover"), description.topic) as movers:

            def stats() -> Any:
                return movers.stats()[description.topic]

            eventually(lambda: stats().state == "failing", "the refusal")
            assert "AuthorizationError" in stats().problem
            assert f"`delaylevel doctor {description.topic}`" in stats().problem
            token = roles.secured.load(token=roles.secured.token)
            found = {item.check: item for item in examine(token, description.topic)}
            assert found["subscription prefix"].state is State.FAILED
            # The mover's role may not read the rules, but it sees what they forbid.
            assert not_opened(roles) >= {"consumer", "reader"}
            owner._rest.post(mode, "None")
            eventually(lambda: stats().counts["window"] == 1, "the hand-off")
            assert "consumer" not in not_opened(roles), "what docs/security.md grants is enough"
