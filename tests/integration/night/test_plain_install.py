"""Tests of every command in an install without extras, on a real broker."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from delaylevel import PartitionBy, PartitionStrategy
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels
from support import plain_install
from support.loading import load
from support.world import RealWorld

commands_page = load("tools/make_reference.py").commands_page
HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=3))

#: Commands by the extra that they lack; none if they work. TOPIC is a level topic with a tracker,
#: SIMPLE one without.
COMMANDS: dict[str, tuple[str, ...]] = {
    "": (
        *("plan --rate 10 --max-delay 3d --size 100", "doctor TOPIC"),
        *("levels create NEW", "levels describe TOPIC", "levels list NAMESPACE"),
        *("levels pause TOPIC", "levels resume TOPIC", "levels set TOPIC --attribute size"),
        *("levels expand SIMPLE --max-delay 4h", "levels drain SIMPLE", "levels delete NEW"),
        *("send TOPIC hi --after 2h", "pending outcome TOPIC --id id"),
        *("dlq list TOPIC", "dlq replay TOPIC --all", "dlq discard TOPIC --all --count 0"),
        "dlq show TOPIC 1:2:-1",
    ),
    "window": ("run TOPIC", "dispatcher run TOPIC", "horizon TOPIC", "demo"),
    "spark": ("mover run TOPIC",),
    "inspect": (
        *("pending list TOPIC", "pending average TOPIC size"),
        *("pending cancel TOPIC --key k --count 1", "pending cancel TOPIC --id id --timeout 1s"),
        "pending fire TOPIC --key k --count 1",
        "pending reschedule TOPIC --key k --count 1 --at +1h",
    ),
}
# They manage a broker on this machine or a Function in the cluster, and need no extra here.
OTHERS = {
    *("broker fetch", "broker start", "broker status", "broker stop"),
    *("mover delete", "mover deploy", "mover status"),
}


def test_every_command_is_here() -> None:
    helped = re.findall(r"^#+ delaylevel (.+)$", commands_page(), re.MULTILINE)
    groups = {name.rpartition(" ")[0] for name in helped}
    lines = [line for lines in COMMANDS.values() for line in lines]
    named = {name[0] for line in lines if (name := re.match(r"[a-z]+( [a-z]+)?(?= |$)", line))}
    assert {*named, *OTHERS} == set(helped) - groups


@pytest.fixture
def names(world: RealWorld) -> dict[str, str]:
    """The values of the words in capitals."""
    hours, tracker = Levels(HOURS), FinalWindow.TRACKER
    world.level_topic(hours, ("orders",), final_window=tracker)
    world.level_topic(hours, ("simple",))
    return {
        "TOPIC": world.topic("orders"),
        "SIMPLE": world.topic("simple"),
        "NEW": world.topic("new"),
        "NAMESPACE": world.namespace,
    }


def test_commands_name_the_extra_that_they_lack(
    names: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    runs = [(line, lacks) for lacks, lines in COMMANDS.items() for line in lines]
    commands = [[names.get(word, word) for word in line.split()] for line, _ in runs]
    answers = plain_install.run(commands, env=environment, cwd=tmp_path, timeout=300)
    assert len(answers) == len(runs)
    for (line, lacks), (code, output, trace) in zip(runs, answers, strict=True):
        assert not trace, f"{line}\n{trace}"
        if lacks:
            assert f"delaylevel[{lacks}]" in output, f"{line}: {output}"
            assert code in (1, 2), f"{line}: {code}"
        else:
            assert "delaylevel[" not in output, f"{line}: {output}"
