"""Tests that a producer needs nothing that only POSIX systems have.

They run in a Python from which these modules and functions were removed. Nothing was run on
Windows or macOS.
"""

from __future__ import annotations

import pytest

from support.python import python

# Modules and attributes that Windows does not have (Python's documentation: Availability: Unix).
WITHOUT_POSIX = """
import multiprocessing, os, select, signal, subprocess, sys, tempfile, threading  # as they are
import asyncio, ssl, socket
# Other packages have files for each platform, and choose one when they are imported.
import click, numpy, platformdirs, pulsar, pulsar.asyncio, pyarrow, urllib3

class Absent:
    names = {"fcntl", "termios", "tty", "pty", "pwd", "grp", "resource", "syslog", "posix"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in Absent.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
for module, names in {
    os: "fork register_at_fork geteuid getuid getgid setsid killpg getpgid uname mkfifo nice "
        "pread preadv pwrite statvfs fchmod fchown chown getloadavg posix_spawn wait4 WNOHANG",
    signal: "SIGKILL SIGSTOP SIGCONT SIGHUP SIGUSR1 SIGCHLD SIGALRM setitimer pthread_kill",
    select: "poll epoll",
    socket: "AF_UNIX",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
USES = {
    "producer": """
from delaylevel import DelayLevelClient, Levels, PartitionBy, PartitionStrategy, wrap
import delaylevel.asyncio, delaylevel.config, delaylevel.metrics, delaylevel.topics
client = DelayLevelClient("pulsar://127.0.0.1:1", logger=delaylevel.cluster.logs.silent())
client.close()
""",
    "tests of an application": """
from datetime import timedelta
from delaylevel import PartitionStrategy
from delaylevel.testing import MemoryPulsar
with MemoryPulsar() as memory:
    client = memory.client()
    consumer = client.subscribe("reminders", "app")
    producer = client.create_producer(
        "reminders", enable_delay_level_topic=True, partition_strategy=PartitionStrategy()
    )
    producer.send(b"pay me", deliver_after=timedelta(days=3))
    memory.advance(timedelta(days=3))
    assert consumer.receive(timeout_millis=0).data() == b"pay me"
""",
    "commands": """
from delaylevel.cli.main import cli
for line in (["levels", "create", "--help"], ["send", "--help"], ["plan", "--help"]):
    try:
        cli(line)
    except SystemExit as ended:
        assert ended.code == 0
""",
}


@pytest.mark.parametrize("use", USES)
def test_it_works_without_what_only_posix_has(use: str) -> None:
    program = f"{WITHOUT_POSIX}\nimport delaylevel.cluster.logs\n{USES[use]}"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_the_removal_is_effective() -> None:
    program = f"{WITHOUT_POSIX}\nimport delaylevel.broker.distribution"
    done = python("-c", program)
    assert "No module named 'fcntl'" in done.stderr
