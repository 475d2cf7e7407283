"""Every Python example in README.md and docs/ that needs no broker runs here, and examples/.

Examples marked ``with-broker`` or ``background`` run in test_pages.py, in the order of their page.
Those marked ``needs-NAME`` are skipped if the package NAME is not installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from delaylevel.cluster.connection.settings import Connection
from support.pages import FENCE, ROOT, Block, blocks
from support.python import python

TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")
DEPLOYED = re.compile(r"\bdeploy/[\w./]+\w")
TITLE = re.compile(r"^#+ (.*)$", re.MULTILINE)


def of_kind(kind: str, page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.kind == kind]


def _examples() -> list[object]:
    found = []
    for page in PAGES:
        for block in of_kind("python", page):
            name = f"{page.relative_to(ROOT)}:{block.line}"
            needed = re.fullmatch(r"(?:needs-(\w+))?", block.options)
            if needed:
                found.append(pytest.param(block.code, name, needed[1], id=name))
    return found


def test_there_are_examples() -> None:
    assert len(_examples()) > 15


@pytest.mark.parametrize(("code", "name", "needed"), _examples())
def test_example(
    code: str, name: str, needed: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if needed:
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)  # some examples have files
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


TESTED = [page for page in PAGES if "```python pytest" in page.read_text(encoding="utf-8")]
# What a project has of its own: a way to run `async def` tests, and here the broker of our tests.
CONFTEST = """
import asyncio, inspect, os, types
import pytest
from delaylevel.config import Connection

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{{name: pyfuncitem.funcargs[name] for name in names}}))
        return True

@pytest.fixture(scope="session")
def embedded_broker():
    return types.SimpleNamespace(connection=Connection.load(service_url={0!r}, admin_url={1!r}))
"""


def run_tests(project: Path, folder: Path) -> int:
    """Run the tests of a folder as its user does; return their number, all of which pass."""
    written = sum(path.read_text().count("def test_") for path in folder.rglob("test_*.py"))
    program = ["-p", "delaylevel.testing.plugin", "-p", "no:cacheprovider", "-q", str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    done = python("-m", "pytest", *program, cwd=project, env=environ)
    assert f"{written} passed" in done.stdout, done.stdout
    assert "failed" not in done.stdout
    return written


@pytest.mark.parametrize("page", TESTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_of_a_page_pass(page: Path, tmp_path: Path, connection: Connection) -> None:
    for block in of_kind("python", page):
        name, _, _ = block.code.partition("\n")
        kind, _, needed = block.options.partition(" needs-")
        if needed:
            pytest.importorskip(needed)
        if kind == "pytest":
            path = tmp_path / name.removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
    text = CONFTEST.format(connection.service_url, connection.admin_url)
    (tmp_path / "conftest.py").write_text(text, encoding="utf-8")
    run_tests(tmp_path, tmp_path)


def test_the_tests_of_the_examples_pass() -> None:
    assert run_tests(ROOT, ROOT / "examples") >= 3


def test_settings_of_other_programs_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    found = [block for page in PAGES for block in of_kind("yaml", page)]
    assert found
    assert all(yaml.safe_load(block.code) for block in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / match["target"] if match["target"] else page
        assert target.exists(), match[0]
        if match["anchor"] and target.suffix == ".md":
            assert match["anchor"] in _anchors(target), match[0]


def test_the_files_of_a_deployment_exist() -> None:
    named = {name for page in PAGES for name in DEPLOYED.findall(page.read_text(encoding="utf-8"))}
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def _anchors(page: Path) -> set[str]:
    titles = TITLE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
