"""Every command and example in README.md and docs/, run page by page on a real broker.

Each page has an empty ``public/default`` to itself, so nothing on it changes except the addresses
and paths of examples (`Reader.words`). The preconditions of each page are in page_steps.py.
The info string of a fence has options for its block:

``no-run: reason``  the block cannot run in a test; `NOT_RUN` lists all of these
``exits-N``         its commands exit with this code
``stopped``         programs that run until Ctrl-C are stopped first (such commands are known)
``with-broker``     Python that needs a broker; the blocks of a page share their names. A block that
                    begins with ``# some/file.py`` is written to that file
``background``      Python that needs a broker and runs until Ctrl-C, while later blocks run
``needs-NAME``      Python that runs where the package NAME is installed (test_examples.py)
``walked``          a step of a new user: test_walk.py types it (`walk` has more such options)
``pytest``          a file of a project, ``# some/file.py``, whose tests test_examples.py runs

``sh`` blocks are commands. In ``console`` blocks commands begin with ``$``, and the lines below a
command must be in its output (``...`` for omitted text).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import urllib3
from click.testing import CliRunner

from delaylevel.broker.distribution import distribution_directory
from delaylevel.broker.embedded import EmbeddedBroker, instances
from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from support.page_steps import Step
from support.pages import ROOT, blocks
from support.world import eventually

KINDS = {"sh", "console", "python", "java", "text", "yaml"}
OPTION = re.compile(
    r"exits-\d|background|stopped|with-broker|pytest|needs-\w+|walked|terminal-\d|with-(run|spark)"
)
SPARK = r"(-v )?mover run"
OUTSIDE = re.compile(rf"delaylevel ({SPARK}|(dispatcher )?run|mover|broker|demo)\b")
FOREVER = re.compile(rf"delaylevel ({SPARK}|(dispatcher )?run)\b(?!.*--once)")
# Checks of `delaylevel doctor` that show that a process is running.
CHECKS = {"mover run": "mover", "dispatcher": "dispatcher"}
# Spark takes ten seconds to start on an idle machine, and minutes on a busy one.
PATIENCE_S = 400
# Emptying a namespace takes a second, or it never ends.
EMPTY_S = 30.0

NOT_RUN = {
    "README.md": "these are the tests",
    "docs/concepts.md": "the namespace stays for other pages",
    "docs/operations.md": "there is no such subscription",
    "docs/security.md": "the role of this page is no admin of the tenant",
    "docs/spark.md": "it downloads packages",
}

PAGES = {
    str(page.relative_to(ROOT)): blocks(page)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


class Reader:
    """A reader who types the commands of a page, in a folder like a checkout.

    Attributes:
        folder: the reader's folder.
        connection: the address of the broker.
        words: the replacements for words of the page, such as addresses.
        names: the global names of the page's Python blocks.
        stack: the cleanup to do when the reader leaves.
    """

    def __init__(self, folder: Path, connection: Connection) -> None:
        self.folder = folder
        self.connection = connection
        self.words = {
            "pulsar://localhost:6650": connection.service_url,
            "http://localhost:8080": connection.admin_url,
            "/var/lib/delaylevel": str(folder / "var"),
            "/data/": f"{folder}/data/",
        }
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.stack = contextlib.ExitStack()
        self._running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def translated(self, text: str) -> str:
        """Return a text of the page with this machine's addresses."""
        for word, here in self.words.items():
            text = text.replace(word, here)
        return re.sub(r"--metrics-port \d+", "--metrics-port 0", text)

    def do(self, *steps: Step) -> None:
        """Establish the preconditions of a page."""
        for step in steps:
            if isinstance(step, str):
                self.type(step)
            else:
                step(self)

    def type(self, line: str, code: int = 0) -> str:
        """Run a command line; one that runs until Ctrl-C continues in the background.

        Args:
            line: the command line for a shell.
            code: the expected exit code.

        Returns:
            The output.
        """
        words = shlex.split(self.translated(line), comments=True)
        names = [word for word in words if not word.startswith("-")]
        program = " ".join(names[:3])
        self.stop(program)  # a terminal does one thing at a time
        if FOREVER.match(bare(line)):
            self._start(words, program, "".join(names[3:4]))
            return ""
        shell = set("|<>;&$\n") & set(re.sub(r"'[^']*'|\"[^\"]*\"", "", bare(line)))
        if line.startswith("delaylevel ") and not (OUTSIDE.match(line) or shell):
            done = CliRunner().invoke(cli, words[1:], catch_exceptions=False)
            found, output = done.exit_code, done.output
        else:
            ran = subprocess.run(
                ["sh", "-e", "-c", self.translated(line)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE_S * 4,
                check=False,
            )
            found, output = ran.returncode, ran.stdout
        assert found == code, f"{line}: exit code {found}\n{output}"
        return output

    def type_until_done(self, line: str) -> None:
        """Run a command line repeatedly until it exits with 0."""

        def done() -> bool:
            with contextlib.suppress(AssertionError):
                self.type(line)
                return True
            return False

        eventually(done, line, PATIENCE_S)

    def python(self, code: str, background: bool = False) -> None:
        """Run a Python block of the page after those before it."""
        file = re.match(r"# (\S+\.py)\n", code)
        code = self.translated(code)
        if file:
            path = self.folder / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
        if background:
            self._start([sys.executable, "-c", code], "python", "orders")
        else:
            exec(compile(code, "the page", "exec"), self.names)

    def _start(self, words: Sequence[str], program: str, topic: str) -> None:
        log = self.folder / f"{program.replace('/', '+')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        self._running[program] = process, log
        said = " ".join(words[1:])
        check = next((check for word, check in CHECKS.items() if word in said), "")
        eventually(
            lambda: (
                process.poll() is not None
                or (self._healthy(topic, check) if check else log.stat().st_size)
            ),
            program,
            PATIENCE_S,
        )
        assert process.poll() is None, f"{shlex.join(words)}\n{log.read_text()}"

    @staticmethod
    def _healthy(topic: str, check: str) -> bool:
        said = CliRunner().invoke(cli, ["doctor", topic, "-o", "json"]).stdout
        return any((row["check"], row["state"]) == (check, "ok") for row in json.loads(said))

    def stop(self, program: str | None = None) -> None:
        """Stop a program, or all of them, with Ctrl-C."""
        for name in [program] if program is not None else list(self._running):
            if name in self._running:
                process, log = self._running.pop(name)
                process.send_signal(signal.SIGINT)
                code = process.wait(PATIENCE_S)
                assert code == 0, f"{name}: exit code {code}\n{log.read_text()}"

    def empty(self) -> None:
        """Delete everything in the namespaces that pages use."""
        assert _empty(self.connection)

    def serve(self, line: str) -> None:
        """Start a server that runs until the reader leaves."""
        with (self.folder / "servers.log").open("ab") as log:
            process = subprocess.Popen(line.split(), stdout=log, stderr=log)
        self.stack.callback(self._end, process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait(PATIENCE_S)

    def leave(self) -> None:
        """Remove everything that the reader started, also after a failure."""
        for process, _ in self._running.values():
            self._end(process)
        self.stack.close()
        if "spark" in self.names:
            self.names["spark"].stop()
        for instance in instances():
            EmbeddedBroker(instance.name).remove()


def bare(line: str) -> str:
    """Return a command without its comment."""
    return re.sub(r"\s+#.*", "", line)


def _empty(connection: Connection) -> bool:
    """Delete everything in the namespaces that pages use; return False if that is impossible.

    If a client looks up a topic in the namespace at that moment, the broker may be left with two
    opinions about the namespace's bundles. Then it neither deletes nor creates the namespace.
    """
    http = urllib3.PoolManager(timeout=60)
    try:
        for name in ("public/default", "public/demo", "public/levels"):
            url = f"{connection.admin_url}/admin/v2/namespaces/{name}"
            eventually(functools.partial(_delete_namespace, http, url), name, EMPTY_S)
            made = functools.partial(http.request, "PUT", url)
            eventually(lambda made=made: made().status == 204, name, EMPTY_S)
    except AssertionError:
        return False
    return True


def _delete_namespace(http: urllib3.PoolManager, url: str) -> bool:
    if http.request("DELETE", url, fields={"force": "true"}).status in (204, 404):
        return True
    # A deletion may leave a topic fenced (seen with __change_events); then none succeeds until the
    # topic was unloaded.
    http.request("PUT", f"{url}/unload")
    return False


@pytest.fixture
def reader(
    request: pytest.FixtureRequest,
    broker_with: Callable[..., EmbeddedBroker],
    private_broker: Callable[..., EmbeddedBroker],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Reader]:
    """A reader of the page ``title``, with ``public/default`` of a broker to themselves."""
    # A Function that is left behind would recreate its topics, so such a page has a private broker.
    functions = request.node.callspec.params["title"] == "docs/functions.md"
    broker = None if functions else broker_with()
    if broker is None or not _empty(broker.connection):
        broker = private_broker(functions=functions)
        assert _empty(broker.connection)
    connection = broker.connection.model_copy(update={"operation_timeout_seconds": 60})
    _checkout(tmp_path)
    paths = (Path(sys.executable).parent, distribution_directory() / "bin", os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    (tmp_path / "client.conf").write_text(f"webServiceUrl={connection.admin_url}\n")
    monkeypatch.setenv("PULSAR_CLIENT_CONF", str(tmp_path / "client.conf"))
    for kind in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    monkeypatch.setenv("DELAYLEVEL_SERVICE_URL", connection.service_url)
    monkeypatch.setenv("DELAYLEVEL_ADMIN_URL", connection.admin_url)
    monkeypatch.setenv("DELAYLEVEL_OPERATION_TIMEOUT_SECONDS", "60")
    monkeypatch.chdir(tmp_path)
    found = Reader(tmp_path, connection)
    # Shells ignore SIGINT in background jobs, and programs inherit that: they would never see it.
    at_first = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    signal.signal(signal.SIGINT, at_first)
    found.leave()


def _checkout(folder: Path) -> None:
    """Create the parts of a checkout that pages use, with the virtual environment of `make`."""
    (folder / ".venv").mkdir()
    for item in Path(sys.prefix).iterdir():
        (folder / ".venv" / item.name).symlink_to(item)
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv/.installed").unlink(missing_ok=True)
    (folder / ".venv/.installed").touch()
