"""Tests of targets that are added while movers and dispatchers run: their messages arrive."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from support.new_targets import BRIEF, TOTAL, arrived, dead, send_to_new_targets
from support.world import RealWorld

pytestmark = pytest.mark.broker


@pytest.mark.spark
def test_the_spark_job_delivers_to_targets_that_were_added_just_now(
    world: RealWorld, spark_job: Callable[..., Any]
) -> None:
    description = world.level_topic(BRIEF)
    with spark_job(description) as job:
        job.ready()
        names = send_to_new_targets(world, description, timedelta(milliseconds=500))
        world.eventually(
            lambda: arrived(world, names) + len(dead(world, description)) >= TOTAL, "all messages"
        )
        assert dead(world, description) == []
        assert arrived(world, names) == TOTAL
        world.drained(description)
