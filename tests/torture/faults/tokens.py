"""Tokens that expire, because nobody renews them."""

from __future__ import annotations

import random

from torture.scene import TOKEN_S, Scene

from .fault import Fault, Undo


def _can_expire(scene: Scene) -> bool:
    return scene.token is not None


def _expire(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Let the token of every process expire; renew it later."""
    assert scene.token is not None
    scene.token.lapse()
    undo.callback(scene.token.renew)


FAULTS: tuple[Fault, ...] = (
    Fault("tokens expire", (TOKEN_S + 1, TOKEN_S + 8), _expire, weight=2.0, possible=_can_expire),
)
