"""Tokens that expire, because nobody renews them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torture.scene import TOKEN_S, Scene

from .fault import Fault, Undo


@dataclass(frozen=True)
class TokensExpired:
    """The token of every process, which expires and is renewed later."""

    name: str = "tokens expire"
    lasts_s: tuple[float, float] = (TOKEN_S + 1, TOKEN_S + 8)
    weight: float = 2.0
    alone: bool = False

    def possible(self, scene: Scene) -> bool:
        return scene.token is not None

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        assert scene.token is not None
        scene.token.lapse()
        return scene.token.renew


FAULTS: tuple[Fault, ...] = (TokensExpired(),)
