"""Tests of the processes that the local broker and its programs need, without starting any."""

from __future__ import annotations

import socket

import pytest

from delaylevel.broker import process


def test_too_few_free_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(process, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="stop a program that listens there"):
            process.free_ports(1)
