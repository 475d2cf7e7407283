"""Tests of ``delaylevel mover run`` as a program: killed, started twice, ended, run from cron."""

from __future__ import annotations

import pytest

from support.spark_process import Start, end, said

pytestmark = [pytest.mark.spark, pytest.mark.broker]


def test_without_a_level_topic(cli_process: Start, namespace: str) -> None:
    job = cli_process("mover", "run", f"{namespace}/nothing", "--once")
    assert end(job) == 1
    assert "delaylevel levels create" in said(job)
    assert "Traceback" not in said(job)


def test_without_a_broker(cli_process: Start, environment: dict[str, str]) -> None:
    environment["DELAYLEVEL_SERVICE_URL"] = "pulsar://127.0.0.1:1"
    environment["DELAYLEVEL_ADMIN_URL"] = "http://127.0.0.1:1"
    job = cli_process("mover", "run", "orders", "--once")
    assert end(job) == 3
    assert "delaylevel broker start" in said(job)
    assert "Traceback" not in said(job)
