"""Tests of the archive of a server's classes; no broker is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from delaylevel.broker import conf, embedded
from delaylevel.errors import BrokerError, InvalidInputError

JAVA = "#!/bin/sh\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a server that is fetched, and a program for Java."""
    program = tmp_path / "java"
    program.write_text(JAVA)
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

    def __init__(self, _: str, *, archive_to: Path, **__: Any) -> None:
        self._archive_to = archive_to

    def start(self) -> None:
        Broker.starts += 1
        if Broker.error is not None:
            raise Broker.error

    def stop(self, **_: Any) -> bool:
        if Broker.content is not None and not self._archive_to.exists():
            self._archive_to.write_bytes(Broker.content)
        return True


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> type[Broker]:
    monkeypatch.setattr(embedded, "EmbeddedBroker", Broker)
    for name, value in (("content", b"classes"), ("error", None), ("starts", 0)):
        monkeypatch.setattr(Broker, name, value)
    return Broker


def archives(home: Path) -> list[Path]:
    return [path for path in home.iterdir() if path.suffix in (".jsa", ".part")]


def test_an_archive_is_made_once(home: Path, broker: type[Broker]) -> None:
    reports: list[str] = []
    assert embedded.prepare(reports.append) == home
    assert embedded.prepare(reports.append) == home
    assert broker.starts == len(reports) == 1
    assert [path.read_bytes() for path in archives(home)] == [b"classes"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, None),
        (b"a part", BrokerError("it ended")),
        (None, OSError(28)),
        (None, InvalidInputError("blanks in the path of temporary files")),
    ],
)
def test_a_server_that_is_not_prepared_can_be_used(
    home: Path, broker: type[Broker], content: bytes | None, error: Exception | None
) -> None:
    broker.content, broker.error = content, error
    reports: list[str] = []
    assert embedded.prepare(reports.append) == home
    assert "starts more slowly" in reports[-1]
    assert archives(home) == []
    archive = conf.archive_path(home, embedded.java())
    assert conf.archive_reading(archive, home / "log4j2.yaml") == {}


def test_an_archive_of_a_killed_process_is_not_used(
    home: Path, broker: type[Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_WRITE_S", 0)
    reports: list[str] = []
    embedded.prepare(reports.append)
    assert "took more than" in reports[-1]
    assert archives(home) == []
