"""Rules for the pages: their blocks, links and lists, and every Python example without a broker.

Examples marked ``with-broker`` or ``background`` run in night/test_pages.py, in the order of their
page. Those marked ``needs-NAME`` are skipped if the package NAME is not installed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
from pathlib import Path
from types import FunctionType
from typing import Any

import click
import pytest

from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rules import OURS, RULES
from support.loading import load
from support.pages import FENCE, KINDS, OPTION, PAGES, ROOT, Block, blocks, blocks_of
from support.python import python


@pytest.mark.parametrize("name", PAGES)
def test_every_block_has_a_known_kind_and_known_options(name: str) -> None:
    for block in PAGES[name]:
        assert block.kind in KINDS, f"{name}:{block.line}"
        assert all(map(OPTION.fullmatch, block.options.split())), f"{name}:{block.line}"
    # No code hides in an indented block.
    assert not re.findall(r"\n\n    \S.*", FENCE.sub("", (ROOT / name).read_text(encoding="utf-8")))


OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def test_the_table_has_the_rules_of_the_code() -> None:
    _, _, rest = OPERATIONS.partition("| rule | what we need |")
    table = rest.split("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == list(RULES)


def test_the_page_names_every_policy_of_our_topics() -> None:
    (row,) = re.findall(r"\| topic policies \|.*", OPERATIONS)
    assert row.count("`set-") == sum(value is not None for value in vars(OURS).values()) + 1


TOOL = load("tools/make_reference.py")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = re.findall(r"^\| `(delaylevel[\w.]*)` \| \w", API, re.MULTILINE)


def public(module: str) -> list[Any]:
    """Return the public classes and functions of a module."""
    loaded = importlib.import_module(module)
    own = [name for name, value in vars(loaded).items() if _is_own(value, module, name)]
    values = (getattr(loaded, name) for name in getattr(loaded, "__all__", own))
    return [each for each in values if isinstance(each, type | FunctionType)]


def _is_own(value: object, module: str, name: str) -> bool:
    return getattr(value, "__module__", "") == module and not name.startswith("_")


PUBLIC = [(module, each) for module in MODULES for each in public(module)]


def test_the_page_lists_every_command() -> None:
    helped = re.findall(r"^#+ delaylevel (.+)$", TOOL.commands_page(), re.MULTILINE)
    groups = {name.rpartition(" ")[0] for name in helped}
    listed = re.findall(r"^\| `delaylevel ([^`]+)` \|", API, re.MULTILINE)
    assert sorted(listed) == sorted(set(helped) - groups)


def test_every_module_has_names() -> None:
    assert len(MODULES) > 20
    assert {module for module, _ in PUBLIC} == set(MODULES)
    front = {each.__name__ for module, each in PUBLIC if module == "delaylevel"}
    assert {"DelayLevelClient", "wrap", "PartitionStrategy", "TimeBucketTracker"} <= front


@pytest.mark.parametrize(
    ("module", "item"), PUBLIC, ids=[f"{module}.{item.__name__}" for module, item in PUBLIC]
)
def test_every_public_name_has_a_docstring(module: str, item: Any) -> None:
    # A dataclass without a docstring has its signature for one.
    text = item.__doc__ or f"{item.__name__}("
    assert not text.startswith(f"{item.__name__}("), f"{item.__module__}.{item.__name__}"
    for name, member in vars(item).items() if isinstance(item, type) else ():
        if not name.startswith("_") and isinstance(
            member, FunctionType | property | classmethod | staticmethod
        ):
            assert inspect.getdoc(getattr(item, name)), f"{item.__module__}.{item.__name__}.{name}"


TEXTS = [*map(ROOT.joinpath, PAGES), ROOT / "docs" / "alerts.yml"]
INLINE = re.compile(r"`(delaylevel [a-z][^`…]*)`", re.DOTALL)


def _lines() -> list[object]:
    found: dict[tuple[str, str], None] = {}
    texts = {page.name: page.read_text(encoding="utf-8") for page in TEXTS}
    texts["help"] = TOOL.commands_page()
    for page, text in texts.items():
        for block in (each for each in blocks_of(text) if each.kind in ("sh", "console")):
            for line in block.code.replace("\\\n", " ").splitlines():
                line = line.removeprefix("$ ").strip()
                if line.startswith("delaylevel "):
                    found[page, line] = None
        for line in INLINE.findall(text):
            found[page, " ".join(line.split())] = None
    return [pytest.param(line, id=f"{page}: {line}") for page, line in found]


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        words.append(word)
    return words[1:]


def test_command_lines_are_found() -> None:
    assert len(_lines()) > 100


@pytest.mark.parametrize("line", _lines())
def test_the_program_has_this_command(line: str) -> None:
    if re.search(r"[a-z]\|[a-z]", line):
        # `delaylevel levels drain|delete` names two commands.
        *before, last = line.split("|")
        first, _, one = before[0].rpartition(" ")
        names = [one, *before[1:], last.split()[0]]
        assert [_check(f"{first} {name}") for name in names]
        return
    _check(line)


def _check(line: str) -> bool:
    command: click.Command = cli
    words = _words(line)
    while True:
        try:
            _, words, _ = command.make_parser(click.Context(command)).parse_args(words)
        except click.BadOptionUsage:  # a text that names an option without its value
            return True
        except click.UsageError as error:
            raise AssertionError(f"{line}: {error.format_message()}") from error
        if not isinstance(command, click.Group) or not words:
            return True
        name, *words = words
        child = command.get_command(click.Context(command), name)
        if child is None and command.name == "pending":
            child, words = command.commands["list"], [name, *words]  # meant by `pending TOPIC`
        assert child is not None, f"{line}: no command {name}"
        command = child


@pytest.mark.parametrize("line", ["delaylevel levels make x", "delaylevel doctor --fast"])
def test_a_wrong_command_line_is_detected(line: str) -> None:
    with pytest.raises(AssertionError, match=r"(no command|No such option)"):
        _check(line)


TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")
TEXT_PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")
DEPLOYED = re.compile(r"\bdeploy/[\w./]+\w")
TITLE = re.compile(r"^#+ (.*)$", re.MULTILINE)


def of_kind(kind: str, page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.kind == kind]


def _examples() -> list[object]:
    found = []
    for page in TEXT_PAGES:
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


TESTED = [page for page in TEXT_PAGES if "```python pytest" in page.read_text(encoding="utf-8")]
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
    found = [block for page in TEXT_PAGES for block in of_kind("yaml", page)]
    assert found
    assert all(yaml.safe_load(block.code) for block in found)


@pytest.mark.parametrize("page", TEXT_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / match["target"] if match["target"] else page
        assert target.exists(), match[0]
        if match["anchor"] and target.suffix == ".md":
            assert match["anchor"] in _anchors(target), match[0]


def test_the_files_of_a_deployment_exist() -> None:
    named = {
        name for page in TEXT_PAGES for name in DEPLOYED.findall(page.read_text(encoding="utf-8"))
    }
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def _anchors(page: Path) -> set[str]:
    titles = TITLE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
