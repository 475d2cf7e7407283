"""Tests of the archive of a server's classes; no broker is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from delaylevel.broker import conf, embedded
from delaylevel.errors import BrokerError, InvalidInputError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a server that is fetched, and a program for Java."""
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\n")
    folder = tmp_path / "apache-pulsar-4.0.8"
    folder.mkdir()
    monkeypatch.setattr(embedded, "java", lambda: str(program))
    monkeypatch.setattr(embedded, "fetch", lambda report, version: folder)
    return folder


class Broker:
    """A broker that writes what Java would write."""

    content: bytes | None = b"classes"
    error: Exception | None = None
    starts = 0

    def __call__(self, _: str, *, archive_to: Path, **__: Any) -> Broker:
        self._archive_to = archive_to
        return self

    def start(self) -> None:
        self.starts += 1
        if self.error is not None:
            raise self.error

    def stop(self, **_: Any) -> bool:
        if self.content is not None and not self._archive_to.exists():
            self._archive_to.write_bytes(self.content)
        return True


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()
    monkeypatch.setattr(embedded, "EmbeddedBroker", broker)
    return broker


def archives(home: Path) -> list[bytes]:
    return [path.read_bytes() for path in home.iterdir() if path.suffix in (".jsa", ".part")]


def test_an_archive_is_made_once(home: Path, broker: Broker) -> None:
    reports: list[str] = []
    for _ in range(2):
        assert embedded.prepare(reports.append) == home
    assert broker.starts == len(reports) == 1
    assert archives(home) == [b"classes"]


@pytest.mark.parametrize(
    ("content", "error", "killed"),
    [
        (None, None, False),
        (b"a part", BrokerError("it ended"), False),
        (None, OSError(28), False),
        (None, InvalidInputError("blanks in the path of temporary files"), False),
        (b"classes", None, True),
    ],
)
def test_a_server_that_is_not_prepared_can_be_used(
    home: Path,
    broker: Broker,
    content: bytes | None,
    error: Exception | None,
    killed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker.content, broker.error = content, error
    if killed:
        monkeypatch.setattr(embedded, "_WRITE_S", 0)
    reports: list[str] = []
    assert embedded.prepare(reports.append) == home
    assert ("took more than" if killed else "starts more slowly") in reports[-1]
    assert archives(home) == []
    archive = conf.archive_path(home, embedded.java())
    assert conf.archive_reading(archive, home / "log4j2.yaml") == {}
