"""Tests of the table of tested versions: page, results and the bounds in setup.cfg agree."""

from __future__ import annotations

import configparser
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.targets.send_state import Sent
from support.loading import load

ROOT = Path(__file__).parents[2]
tool: Any = load("tools/make_versions.py")
STORED = tool.load()


def bounds(requirement: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lower and the upper bound of a requirement."""
    found = re.search(r">=([\d.]+),<([\d.]+)", requirement)
    assert found, requirement
    return tool.key(found[1]), tool.key(found[2])


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", "utf-8")
    return parser


def tried(axis: str, *, passed: bool) -> set[tuple[int, ...]]:
    """Return the versions of an axis in runs that passed, or that failed without a note."""
    found = set()
    for run in tool.runs_of(STORED):
        noted = f"{run.axis} {run.version}" in STORED["notes"]
        if run.passes if passed else (run.axis == axis and not run.passes and not noted):
            found.add(tool.key(getattr(run.setting, axis)))
    return found


def test_the_page_shows_the_results() -> None:
    text = tool.PAGE.read_text("utf-8")
    assert tool.page(text, STORED) == text


def test_every_run_has_a_date_and_all_versions() -> None:
    for run in tool.runs_of(STORED):
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", run.date)
        assert all(vars(run.setting).values())


@pytest.mark.parametrize(("axis", "package"), [("client", "pulsar-client"), ("pyspark", "pyspark")])
def test_the_bounds_admit_what_passes(
    setup: configparser.ConfigParser, axis: str, package: str
) -> None:
    options = setup["options"]["install_requires"] + setup["options.extras_require"]["spark"]
    lines = [line for line in options.splitlines() if line.startswith(package)]
    assert len(lines) == 1
    low, high = bounds(lines[0])
    assert all(
        low <= version[: len(low)] and version < high for version in tried(axis, passed=True)
    )
    assert not [each for each in tried(axis, passed=False) if low <= each[: len(low)] < high]


def test_the_pythons_that_are_named_did_not_fail(setup: configparser.ConfigParser) -> None:
    named = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    numbers = {tool.key(version) for version in named}
    assert tried("python", passed=True) <= numbers
    assert not tried("python", passed=False) & numbers
    assert setup["options"]["python_requires"] == f">={named[0]}"


def test_the_page_is_made_from_the_results() -> None:
    setting = tool.Setting("4.0.8", "3.13.0", "3.11", "4.3.0")
    good = tool.Run("broker", setting, passed=7, date="2026-11-22")
    bad = tool.Run("client", setting, passed=5, failed=["test_flows::test_a"], date="2026-11-22")
    stored = {
        "notes": {"client 3.13.0": "its fault"},
        "runs": [tool.asdict(run) for run in (bad, good)],
    }
    table = tool.table(stored)
    assert "| Pulsar server | 4.0.8 | 7 | passes |" in table
    assert "**1 failed**: its fault" in table
    assert "`test_flows::test_a`" in table
    assert table.index("Pulsar server") < table.index("pulsar-client | 3.13.0")
    whole = tool.page(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n", stored)
    assert whole == f"before\n{table}\nafter\n"


def test_messages_that_are_sent_have_no_dict_as_a_default() -> None:
    # Python 3.10 refuses it when the class is defined.
    assert not [each for each in fields(Sent) if isinstance(each.default, list | dict | set)]


def test_runs_are_in_the_order_of_versions() -> None:
    setting = tool.Setting("4.0.8", "3.13.0", "3.11", "4.3.0")
    runs = [tool.Run("python", tool.replace(setting, python=v)) for v in ("3.9", "3.13", "3.10")]
    assert [run.version for run in tool.in_order(runs)] == ["3.9", "3.10", "3.13"]


def test_a_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a.test_x" name="test_one"/>'
        '<testcase classname="tests.a.test_x" name="test_two"><failure/></testcase>'
        '<testcase classname="tests.a.test_x" name="test_three"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    run = tool.Run("broker", tool.Setting("4.0.8", "3.13.0", "3.11", "4.3.0"))
    tool.read_report(run, report)
    assert (run.passed, run.skipped, run.failed) == (1, 1, ["test_x::test_two"])
    assert not run.passes
