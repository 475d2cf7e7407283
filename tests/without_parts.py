"""A client that lacks private parts, for tests of their public replacements."""

from __future__ import annotations

import pytest

from delaylevel.cluster.client_parts import parts


def without(monkeypatch: pytest.MonkeyPatch, *missing: parts.ClientPart) -> None:
    """Let the search for the client's private parts miss some until the end of the test."""
    monkeypatch.setattr(parts, "_present", parts.look() - set(missing))
