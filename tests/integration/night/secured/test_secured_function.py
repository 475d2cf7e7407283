"""Tests of the Function on a worker with tokens and TLS: its privileges and its token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.model.level_topic import SUBSCRIPTION, Mover, Role
from support.tokens import command_lines, contents, tokens_in
from support.world import eventually

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

BROKER = {
    "functions": True,
    # The worker's settings for its connection to the broker; its instances inherit them.
    "useTls": True,
    "brokerClientTlsEnabled": True,
    "brokerClientTrustCertsFilePath": "{certificate}",
    "tlsTrustCertsFilePath": "{certificate}",
    "tlsHostnameVerificationEnabled": True,
}
PATIENCE_S = 120


def instance_log(secured: Any) -> str:
    """Return the log of the instances in the worker's folder."""
    logs = (secured.broker.directory / "logs" / "functions").rglob("*.log")
    return "".join(path.read_text() for path in logs)


@pytest.fixture
def program(
    cli_process: Callable[..., Any], tmp_path: Path
) -> Callable[[Any, str, str], tuple[int, str]]:
    """``program(secured, token, "mover", …)``: exit code and output; the token is in a file."""

    def run(secured: Any, token: str, *words: str) -> tuple[int, str]:
        file = tmp_path / "program.token"
        file.write_text(token)
        process = cli_process(*secured.words(), "--token-file", str(file), *words)
        code = process.wait(PATIENCE_S)
        file.unlink()
        return code, process.log.read_text() + process.log.with_suffix(".out").read_text()

    return run


def test_a_function_with_its_own_token_has_the_least_privileges(
    make_roles: Callable[..., Any],
    renewed: Callable[..., Any],
    arrivals: Callable[..., Any],
    program: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    """The Function starts without rights and gets them; later its token expires and is renewed."""
    roles = make_roles(mover=Mover.FUNCTION)
    secured, description = roles.secured, roles.description
    unit = timedelta(milliseconds=description.levels[0].unit_ms)
    roles.grant("sender", "dispatcher", "application", "deployer")
    with roles.owner() as owner:
        namespace = "namespaces/public/default/permissions/deployer"
        owner._rest.post(namespace, ["functions", "packages"])
    deployer = secured.token_of("deployer")
    token = renewed(secured, "mover", tmp_path / "mover.token")
    token.renew()
    words = ("mover", "deploy", description.topic, "--worker-token-file", str(token.path))
    code, said = program(secured, deployer, *words)
    assert code == 0, said

    with contextlib.ExitStack() as stack:
        sending, consuming = stack.enter_context(roles.clients("sender", "application"))
        stack.enter_context(roles.dispatching(tmp_path))
        owner = stack.enter_context(roles.owner())
        consumer = arrivals(consuming, roles.target)
        producer = sending.create_producer(roles.target, enable_delay_level_topic=True)
        producer.send(b"first", deliver_after=3 * unit)
        eventually(
            lambda: "was refused with 401: Unauthorized" in instance_log(secured),
            "refusal",
            PATIENCE_S,
        )
        assert not consumer.has(b"first")

        roles.grant("mover")
        eventually(lambda: consumer.has(b"first"), instance_log(secured), PATIENCE_S)
        sending.create_producer(description.name.partition(0).full).send(b"?")
        producer.send(b"second", deliver_after=3 * unit)
        eventually(lambda: consumer.has(b"second"), instance_log(secured), PATIENCE_S)
        eventually(
            lambda: roles.status().entries(Role.DEAD_LETTER) == 1, "the dead letter", PATIENCE_S
        )
        at_work = command_lines(secured.broker.status().pid)

        def connected() -> bool:
            stats = owner.partition_stats(description.name.partition(0))
            consumers = stats.subscriptions[SUBSCRIPTION].consumers
            return any(item.name.startswith("delaylevel-function@") for item in consumers)

        assert connected()
        token.lapse()
        eventually(lambda: not connected(), "the end of the connection", PATIENCE_S)
        producer.send(b"third", deliver_after=3 * unit)
        token.renew()
        eventually(lambda: consumer.has(b"third"), instance_log(secured), PATIENCE_S)
        eventually(lambda: roles.status().entries(Role.LEVEL) == 0, "acknowledgement", PATIENCE_S)
        assert roles.status().entries(Role.HELD) == 0
        for command in ("status", "delete"):
            code, answer = program(secured, deployer, "mover", command, description.topic)
            assert code == 0, answer
            said += answer
        assert f"moving {description.topic}" in instance_log(secured)

    assert any(b"--client_auth_params" in line for line in at_work.values())
    assert any(str(token.path).encode() in line for line in at_work.values())
    token.lapse()
    token.path.unlink()
    at_work |= command_lines(secured.broker.status().pid) | {"words": said.encode()}
    texts = at_work | dict(contents(secured.folder, tmp_path))
    del texts[str(secured.own_token_file)]
    assert tokens_in([*token.given, deployer, secured.token], texts.items()) == []
