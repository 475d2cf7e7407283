"""Tests of the namespace of a test, with scripted answers of the broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.testing import embedded
from delaylevel.testing.embedded import own_namespace
from support.scripted_http import Answer, Server, reply

DONE = (204, {}, b"")


@pytest.fixture(autouse=True)
def repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = embedded._WHILE_TOPICS_CHANGE.new(backoff_factor=0)
    monkeypatch.setattr(embedded, "_WHILE_TOPICS_CHANGE", at_once)


def _deletions(server: Server, answers: list[Answer]) -> list[str]:
    """Delete a namespace with these answers; return what followed its name in each request."""
    left = list(answers)
    server.answer = lambda method, path: left.pop(0) if method == "DELETE" else DONE
    with own_namespace(Connection(admin_url=server.url)) as name:
        pass
    assert not left
    return [path.split(name)[1] for method, path, *_ in server.seen if method == "DELETE"]


@pytest.mark.parametrize("status", [409, 422, 500, 503])
def test_a_deletion_that_is_refused_for_a_moment_is_repeated(
    servers: Callable[[], Server], status: int
) -> None:
    refused = reply(status, {})
    assert _deletions(servers(), [refused, refused, DONE]) == ["?force=true"] * 3


def test_a_deletion_that_is_always_refused_ends(servers: Callable[[], Server]) -> None:
    assert _deletions(servers(), [reply(422, {})] * 4) == ["?force=true"] * 4
