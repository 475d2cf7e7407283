"""Tests of the words and lines on every page, and of the commands that texts propose."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from delaylevel import PartitionBy, PartitionStrategy
from delaylevel.cli.main import cli
from delaylevel.cluster.rest.admin import Admin
from delaylevel.consumer.retry_topics import RetryTopics, prepare
from delaylevel.errors import LevelTopicError, PermissionDeniedError
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.registry import describe
from support.pages import FENCE

ROOT = Path(__file__).parents[2]
PRODUCT = ("delaylevel", "functions", "spark_sync", "cli")
TOOLS = ("benchmarks", "tools")
TESTS = ("tests",)
PAGES = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

#: Phrases that a native speaker would not write. Write `next to` or `besides` for `beside`.
BANNED = re.compile(
    r"\b(anew|beside|so many|is to be|are to be|at the most|likewise|in vain|of its own accord)\b",
    re.IGNORECASE,
)


def files(*tops: str, suffix: str = ".py") -> list[Path]:
    """Return the files below the given folders, and the given files themselves."""
    found = []
    for top in tops:
        path = ROOT / top
        found += [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))
    return found


@pytest.mark.parametrize("top", [*PRODUCT, *TOOLS, *TESTS, *PAGES])
def test_no_phrase_is_stilted(top: str) -> None:
    found = []
    for path in [*files(top), *files(top, suffix=".md")]:
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if BANNED.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert sorted(set(found)) == []


@pytest.mark.parametrize("page", files(*PAGES, suffix=".md"), ids=lambda page: page.name)
def test_lines_of_a_page_end_at_120_columns(page: Path) -> None:
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    # Tables and single words cannot be wrapped.
    long = [line for line in lines if len(line) > 120 and "|" not in line and " " in line.strip()]
    assert long == []


def test_words_of_users_are_quoted() -> None:
    bare = []
    for path in files(*PRODUCT):
        if path.name == "embedded.py":  # names of brokers are safe
            continue
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


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"delay_level_topic": "waiting"},
        {"delay_level_namespace": "public/levels"},
        {"final_window": "broker"},
        {"mover": "function"},
    ],
)
def test_the_command_that_a_producer_names_creates_what_it_needs(
    choice: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryPulsar(namespaces=["public/levels"]) as memory:
        monkeypatch.setattr(Admin, "from_connection", lambda _: nullcontext(memory.admin))
        create = partial(
            memory.client().create_producer,
            enable_delay_level_topic=True,
            create_level_topic=False,
            partition_strategy=PartitionStrategy(
                partition_by=PartitionBy.HOUR,
                maximum_delay=timedelta(days=1),
                lead=timedelta(minutes=1),
                overflow="recirculate",
            ),
        )

        def created(topic: str, **choice: str) -> str:
            with pytest.raises(LevelTopicError) as caught:
                create(topic, **choice)
            (command,) = re.findall("`delaylevel (.*?)`", str(caught.value))
            answer = CliRunner().invoke(cli, shlex.split(command))
            assert answer.exit_code == 0, answer.output
            return str(create(topic, **choice).description.topic)

        level_topic = created("orders", **choice)
        created("invoices", delay_level_topic=level_topic)


def test_the_command_for_the_retries_of_a_listener_suits_the_level_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryPulsar() as memory:
        admin, days = memory.admin, PartitionStrategy(maximum_delay=timedelta(days=3))
        create: Any = memory.client().create_producer
        create("orders", enable_delay_level_topic=True, partition_strategy=days)
        topics = RetryTopics.of("orders", "billing")
        denied = Mock(side_effect=PermissionDeniedError("denied", status=403))
        with monkeypatch.context() as patch:
            patch.setattr(admin, "create_partitioned", denied)
            with pytest.raises(PermissionDeniedError) as caught:
                prepare(admin, topics)
        (command,) = re.findall("`delaylevel (.*?)`", str(caught.value))
        monkeypatch.setattr(Admin, "from_connection", lambda _: nullcontext(admin))
        answer = CliRunner().invoke(cli, shlex.split(command))
        assert answer.exit_code == 0, answer.output
        assert topics.retry.full in describe(admin, "orders").targets
