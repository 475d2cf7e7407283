"""Tests of the pytest plugin on a real broker."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import urllib3

from delaylevel.testing import EmbeddedPulsar


def test_the_namespace_is_deleted_with_its_topics(embedded_pulsar: EmbeddedPulsar) -> None:
    connection = embedded_pulsar.connection
    with EmbeddedPulsar(connection) as other:
        assert other.namespace != embedded_pulsar.namespace
        other.client().create_producer(other.topic("orders")).send(b"x")
        names = other.admin.list_namespaces("public")
        assert {other.namespace, embedded_pulsar.namespace} <= set(names)
    assert other.namespace not in embedded_pulsar.admin.list_namespaces("public")


def test_the_broker_ends_with_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        from pathlib import Path

        def test_two_tests_share_a_broker(embedded_pulsar, embedded_broker):
            Path("url").write_text(embedded_pulsar.connection.admin_url)
            assert embedded_pulsar.connection.admin_url == embedded_broker.connection.admin_url

        def test_but_have_their_own_namespaces(embedded_pulsar):
            assert Path("url").read_text() == embedded_pulsar.connection.admin_url
            assert embedded_pulsar.admin.list_topics(embedded_pulsar.namespace) == []
        """)
    )
    command = [sys.executable, "-m", "pytest", "-p", "delaylevel.testing.plugin", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--basetemp={tmp_path}/base"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout
    with pytest.raises(urllib3.exceptions.HTTPError):
        urllib3.request("GET", (tmp_path / "url").read_text(), retries=False, timeout=5)
