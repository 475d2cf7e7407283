"""Tests of the Spark job with tokens and TLS: least privileges, no revealed token, renewal.

The job is the program that users start, with its JVM and Python workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3

from delaylevel.broker.process import free_ports
from delaylevel.model.level_topic import FinalWindow, Role
from support.tokens import command_lines, contents, tokens_in
from support.world import eventually

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(900)]

# Spark takes ten seconds to start on an idle machine, and minutes on a busy one.
PATIENCE_S = 240

# A log4j configuration that logs everything, instead of errors only.
TALKATIVE = """\
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
rootLogger.level = trace
rootLogger.appenderRef.stdout.ref = console
# Spark takes the level of its shell for all of it, where the two differ.
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = trace
"""


def pages(port: int) -> Iterator[tuple[str, bytes]]:
    """Yield the pages of Spark's user interface and the answers of its REST interface."""
    http, base = urllib3.PoolManager(timeout=30), f"http://127.0.0.1:{port}"
    applications = json.loads(http.request("GET", f"{base}/api/v1/applications").data)
    rest = f"/api/v1/applications/{applications[0]['id']}"
    paths = ["/environment/", "/jobs/", "/stages/", "/executors/", "/SQL/", "/StreamingQuery/"]
    paths += [f"{rest}/{name}" for name in ("environment", "jobs", "stages", "executors")]
    paths += [f"{rest}/sql?details=true&planDescription=true&length=100", f"{rest}/allexecutors"]
    queries = http.request("GET", f"{base}/SQL/").data.decode()
    paths += [f"/SQL/execution/?id={n}" for n in sorted(set(re.findall(r"\?id=(\d+)", queries)))]
    for path in paths:
        answer = http.request("GET", base + path)
        assert answer.status == 200, path
        yield path, answer.data


def test_a_job_with_the_least_privileges_moves_messages_and_reveals_no_token(
    roles: Any,
    arrivals: Callable[..., Any],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """The token is in the environment, from which it could leak to more places than from a file."""
    description, token = roles.description, roles.secured.token_of("mover")
    unit = timedelta(milliseconds=description.levels[0].unit_ms)
    checkpoint, events, local = (tmp_path / name for name in ("checkpoint", "events", "local"))
    events.mkdir()
    local.mkdir()
    talkative = tmp_path / "log4j2.properties"
    talkative.write_text(TALKATIVE)
    (port,) = free_ports(1)
    spark = {
        "spark.ui.enabled": "true",
        "spark.ui.port": str(port),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.local.dir": str(local),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={talkative.as_uri()}",
    }
    words = ["-vv", *roles.secured.words(), "mover", "run", description.topic]
    words += ["--master", "local[1]", "--checkpoint", str(checkpoint)]
    for name, value in spark.items():
        words += ["--conf", f"{name}={value}"]
    with contextlib.ExitStack() as stack:
        sending, consuming = stack.enter_context(roles.clients("sender", "application"))
        stack.enter_context(roles.dispatching(tmp_path))
        consumer = arrivals(consuming, roles.target)
        environment = {**os.environ, "DELAYLEVEL_TOKEN": token}
        job = cli_process(*words, env=environment)

        def running(condition: Callable[[], Any]) -> Any:
            assert job.poll() is None, job.log.read_text()[-5000:]
            return condition()

        producer = sending.create_producer(roles.target, enable_delay_level_topic=True)
        # This message has no valid target, so it becomes a dead letter.
        sending.create_producer(description.name.partition(0).full).send(b"?")
        producer.send(b"level", deliver_after=3 * unit)
        eventually(lambda: running(lambda: consumer.has(b"level")), "the first", PATIENCE_S)
        producer.send(b"again", deliver_after=3 * unit)
        producer.send(b"now")
        producer.send(b"window", deliver_after=unit / 2)
        everything = (b"level", b"again", b"now", b"window")
        eventually(lambda: running(lambda: consumer.has(*everything)), "all", PATIENCE_S)
        status = roles.status
        eventually(lambda: status().entries(Role.DEAD_LETTER) == 1, "the dead letter", PATIENCE_S)
        eventually(lambda: status().entries(Role.LEVEL) == 0, "acknowledgement", PATIENCE_S)
        assert status().entries(Role.HELD) == 0

        # Everything that is visible from outside while the job runs.
        commands = command_lines(job.pid)
        assert any(b"java" in line for line in commands.values())
        assert any(b"pyspark" in line and b"java" not in line for line in commands.values())
        shown = dict(pages(port))
        assert b"delaylevel-sync" in shown["/jobs/"]
        at_work = dict(contents(local))
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE_S) == 0, job.log.read_text()[-5000:]

    said = job.log.read_bytes() + job.log.with_suffix(".out").read_bytes()
    assert b" DEBUG MicroBatchExecution: " in said
    left = dict(contents(checkpoint, events))
    assert any(name.endswith("metadata") for name in left)
    assert any(name.startswith(str(events)) for name in left)
    left |= dict(contents(tmp_path))
    assert tokens_in([token], {**commands, **shown, **at_work, **left, "log": said}.items()) == []


def test_a_job_recovers_from_wrong_and_expired_tokens(
    make_roles: Callable[..., Any],
    renewed: Callable[..., Any],
    arrivals: Callable[..., Any],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """The final window is ``broker``, so the mover writes to the business topic."""
    roles = make_roles(final_window=FinalWindow.BROKER)
    roles.grant("sender", "application", "mover")
    roles.grant_actions("mover", {None: "produce"})
    unit = timedelta(milliseconds=roles.description.levels[0].unit_ms)
    file = tmp_path / "token"
    token = renewed(roles.secured, "mover", file)
    words = [*roles.secured.words(), "--token-file", str(file), "mover", "run"]
    words += [roles.target, "--master", "local[1]", "--checkpoint", str(tmp_path / "checkpoint")]

    token.spoil()
    refused = cli_process(*words)
    assert refused.wait(PATIENCE_S) == 1
    assert "check the token (--token-file" in refused.log.read_text()

    with contextlib.ExitStack() as stack:
        sending, consuming = stack.enter_context(roles.clients("sender", "application"))
        consumer = arrivals(consuming, roles.target)
        producer = sending.create_producer(roles.target, enable_delay_level_topic=True)
        token.renew()
        job = cli_process(*words)

        def said() -> str:
            return str(job.log.read_text())

        def arrives(body: bytes) -> None:
            def has() -> bool:
                assert job.poll() is None, said()[-5000:]
                return consumer.has(body)

            eventually(has, f"{body!r}; the job said: {said()[-3000:]}", PATIENCE_S)

        producer.send(b"well", deliver_after=3 * unit)
        arrives(b"well")
        wrong = ((token.lapse, "the token expired at 20"), (token.spoil, "check the token"))
        for number, (spoil, reason) in enumerate(wrong):
            seen, body = len(said()), b"spoilt %d" % number
            failed = re.compile(f"the query failed.*{reason}")
            spoil()
            eventually(
                lambda seen=seen, failed=failed: failed.search(said(), seen), reason, PATIENCE_S
            )
            producer.send(body, deliver_after=3 * unit)
            token.renew()
            arrives(body)
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE_S) == 0, said()[-5000:]
        status = roles.status()
        left = (
            status.entries(Role.LEVEL),
            status.entries(Role.HELD),
            status.entries(Role.DEAD_LETTER),
        )
        assert left == (0, 0, 0)
    # Copies are allowed (at least once), but each has its message's ID.
    assert [body for body, ids in consumer.ids.items() if len(ids) > 1] == []
    file.unlink()
    assert tokens_in(token.given, contents(tmp_path)) == []
