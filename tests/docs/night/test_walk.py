"""Tests of the first pages: in terminals, and with only the extras of their first block."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from delaylevel.cluster.connection.settings import Connection
from support.pages import ROOT
from support.walk import LIMIT_S, PAGES, WAYS, walk, walked

PROGRAM = ROOT / "tests/support/plain_install.py"
_EXTRAS = re.compile(r"pip install .*\[(.*)\]")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_a_new_user_gets_delayed_messages_within_three_minutes(way: str, tmp_path: Path) -> None:
    done = walk(way, tmp_path)
    assert {step.page for step in done.steps} == set(PAGES)
    assert done.seconds < LIMIT_S, done.report()
    for program in ("python remind.py", "python first.py"):
        (output,) = ("\n".join(step.output) for step in done.steps if step.line == program)
        printed = re.findall(r"^ ?(\d+\.\d) s  (.+)$", output, re.MULTILINE)
        seconds = {words: float(passed) for passed, words in printed}
        assert printed[0][1] == "at once"
        assert seconds["in twelve seconds"] >= 11.9, "early"
        assert seconds.get("in three seconds", 3.0) >= 2.9, "early"


def test_the_extras_of_the_first_block_suffice(
    connection: Connection, namespace: str, tmp_path: Path
) -> None:
    topic = f"persistent://{namespace}/reminders"
    lines: list[list[str]] = []
    for block in [block for page in PAGES for block in walked(page, "run")]:
        if block.kind == "python":
            continue  # producers and consumers need no extra
        for line, _ in block.commands:
            lines += [["--extras", *extras.split(",")] for extras in _EXTRAS.findall(line)]
            words = shlex.split(line, comments=True)
            # `run` does not end; the walk has it with these extras, too.
            if words[0] == "delaylevel" and not {"broker", "run", "delete"} & set(words):
                words = [topic if word == "reminders" else word for word in words[1:]]
                lines += [words] if words not in lines else []
    commands = [words for words in lines if words[0] != "--extras"]
    assert lines[0] == ["--extras", "window"]
    assert {"send", "pending", "horizon"} <= {words[0] for words in commands}
    done = subprocess.run(
        [sys.executable, PROGRAM, "--each"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "DELAYLEVEL_SERVICE_URL": connection.service_url,
            "DELAYLEVEL_ADMIN_URL": connection.admin_url,
        },
        cwd=tmp_path,
        timeout=240,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for words, (code, output, trace) in zip(commands, answers, strict=True):
        assert code == 0, f"{words}: {output}\n{trace}"
