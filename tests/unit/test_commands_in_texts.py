"""Every command that a text proposes can be pasted into a shell, whatever a topic is called."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from delaylevel.errors import LevelTopicError
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.registry import describe

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("delaylevel", "cli", "spark_sync", "functions")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "embedded.py"  # names of brokers are safe
]


def test_words_of_users_are_quoted() -> None:
    bare = []
    for path in SOURCES:
        # A command may go on in the next literal.
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for command in re.findall(r"`delaylevel [^`]*", text):
            words = re.findall(r"\{([^{}]+)\}", command)
            # A command that the code chooses is not a word of a user.
            bare += [
                f"{path} {word}"
                for word in words
                if not word.startswith("shell(") and word != "command"
            ]
    assert bare == []


@pytest.mark.parametrize("name", ["a $b", "a'b", 'a"b', "a$(b)", "a;b", "größe", "orders"])
def test_a_remedy_names_the_topic_as_the_shell_takes_it(name: str) -> None:
    with pytest.raises(LevelTopicError) as caught:
        describe(MemoryPulsar().admin, name)
    command = re.findall(r"`(delaylevel [^`]*)`", str(caught.value))[0]
    assert shlex.split(command)[-1] == f"persistent://public/default/{name}"
