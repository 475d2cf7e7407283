"""All pages, typed on a real broker: every command, and every example that needs a broker.

Each page has a broker to itself, so nothing on it changes except addresses and paths
(`Reader.words`). `BEFORE` has what a page takes for granted.
"""

from __future__ import annotations

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

from delaylevel.broker import EmbeddedBroker
from delaylevel.broker.distribution import distribution_directory
from delaylevel.cluster.connection.settings import Connection
from support.pages import FOREVER, PAGES, ROOT, Block, bare, missing
from support.world import eventually

# Checks of `delaylevel doctor` that show that a process is running.
CHECKS = {"mover run": "mover", "dispatcher": "dispatcher"}
# Spark takes ten seconds to start on an idle machine, and minutes on a busy one.
PATIENCE_S = 400
BRIEF = "delaylevel levels create orders --max-delay 5d"
# One entry for each message: a producer for a Function does not batch.
UNBATCHED = (
    f"{BRIEF} --mover function",
    """for n in $(seq 120); do echo '{"body": "pay me", "after": "3d"}'; done > orders.jsonl""",
    "delaylevel send orders --jsonl orders.jsonl",
)
PENDING = (
    BRIEF,
    "delaylevel send orders 'pay me' --after 90m --key customer-7 --property customer=acme "
    "--property kind=invoice --property amount=12 --property invoice=2030-117",
    "delaylevel send orders 'pay me' --after 3d --property customer=initech",
)
FAILED = """python - <<'END'
from delaylevel import DelayLevelClient
from delaylevel.config import Connection
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import Decision
from delaylevel.consumer.retry_publisher import RetryPublisher

client = DelayLevelClient.from_connection(Connection.load())
consumer = client.subscribe("orders", "billing")
client.create_producer("orders").send(b"pay me")
message = ReceivedMessage(consumer.receive(30_000), "orders", "billing", 0)
RetryPublisher(client, "orders", "billing").bury(message, Decision(None, "only EUR", ValueError()))
client.close()
END"""
#: The commands before a command of a page (without its comment); "" stands for the whole page.
BEFORE: dict[str, dict[str, Sequence[str]]] = {
    "docs/dispatcher.md": {
        "": (BRIEF,),
        "delaylevel dispatcher run orders --delivery effectively-once": (
            "pulsar-admin namespaces set-deduplication public/default --enable",
        ),
    },
    "docs/consuming.md": {
        "delaylevel dlq list orders --subscription billing": (FAILED,),
        "delaylevel dlq discard orders --subscription billing --reason 'only EUR' --count 1": (
            FAILED,
        ),
    },
    "docs/functions.md": {
        "delaylevel mover status orders": (
            "until delaylevel mover status orders; do sleep 1; done",
        ),
    },
    "docs/inspect.md": {"": PENDING},
    "docs/lifecycle.md": {
        "delaylevel levels set orders --on-missing-target dead-letter": (
            "delaylevel levels create orders",
        ),
        "delaylevel levels expand orders --max-delay 60d --then hour:48h": (
            "delaylevel levels delete orders",
            "delaylevel levels create orders --then hour:24h",
        ),
        "delaylevel levels drain orders": ("delaylevel levels delete orders", *PENDING),
        "delaylevel levels delete orders": ("delaylevel levels delete orders --discard 2", BRIEF),
        "delaylevel levels delete orders --discard 120": UNBATCHED,
    },
    "docs/spark.md": {
        "": (
            BRIEF,
            "delaylevel levels create invoices --max-delay 5d",
            "mkdir data",
            'python -c "import pyarrow as pa, pyarrow.parquet as pq; '
            "pq.write_table(pa.table({'account': ['customer-7']}), 'data/closed_accounts')\"",
        )
    },
}


class Reader:
    """A reader who types the commands of a page, in a folder like a checkout."""

    def __init__(self, folder: Path, connection: Connection) -> None:
        self._folder = folder
        self.words = {
            "pulsar://localhost:6650": connection.service_url,
            "http://localhost:8080": connection.admin_url,
            "/var/lib/delaylevel": str(folder / "var"),
            "/data/": f"{folder}/data/",
        }
        # The names of the page's Python blocks.
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def translated(self, text: str) -> str:
        """Return a text of the page with this machine's addresses."""
        for word, here in self.words.items():
            text = text.replace(word, here)
        return re.sub(r"--metrics-port \d+", "--metrics-port 0", text)

    def type(self, line: str, code: int = 0) -> str:
        """Type a command, and return its output; one that runs until Ctrl-C goes on meanwhile."""
        words = shlex.split(self.translated(bare(line)))
        names = [word for word in words if not word.startswith("-")]
        program = " ".join(names[:3])
        self.stop(program)  # a terminal does one thing at a time
        if FOREVER.match(bare(line)):
            self._start(words, program, "".join(names[3:4]))
            return ""
        done = _shell(self.translated(line), stderr=subprocess.STDOUT)
        assert done.returncode == code, f"{line}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def python(self, code: str, background: bool) -> None:
        """Run a Python block of the page after those before it."""
        code = self.translated(code)
        if file := re.match(r"# (\S+\.py)\n", code):
            path = self._folder / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
        if background:
            self._start([sys.executable, "-c", code], "python", "orders")
        else:
            exec(compile(code, "the page", "exec"), self._names)

    def _start(self, words: Sequence[str], program: str, topic: str) -> None:
        log = self._folder / f"{program.replace('/', '+')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        self._running[program] = process, log
        said = " ".join(words[1:])
        check = next((check for word, check in CHECKS.items() if word in said), "")
        eventually(
            lambda: (
                process.poll() is not None
                or (_healthy(topic, check) if check else log.stat().st_size)
            ),
            program,
            PATIENCE_S,
        )
        assert process.poll() is None, f"{shlex.join(words)}\n{log.read_text()}"

    def stop(self, *programs: str) -> None:
        """Stop programs, or all of them, with Ctrl-C."""
        for name in programs or list(self._running):
            if name in self._running:
                process, log = self._running.pop(name)
                process.send_signal(signal.SIGINT)
                code = process.wait(PATIENCE_S)
                assert code == 0, f"{name}: exit code {code}\n{log.read_text()}"

    def leave(self) -> None:
        """Remove everything that the reader started, also after a failure."""
        for process, _ in self._running.values():
            process.terminate()
            process.wait(PATIENCE_S)
        if "spark" in self._names:
            self._names["spark"].stop()
        EmbeddedBroker().remove()


def _shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
    command = ["sh", "-e", "-c", line]
    return subprocess.run(command, text=True, timeout=PATIENCE_S * 4, check=False, **given)


def _healthy(topic: str, check: str) -> bool:
    rows = json.loads(_shell(f"delaylevel doctor {topic} -o json").stdout)
    return any((row["check"], row["state"]) == (check, "ok") for row in rows)


@pytest.fixture
def reader(
    title: str,
    private_broker: Callable[..., EmbeddedBroker],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Reader]:
    """A reader of a page, with a broker to themselves."""
    connection = private_broker(functions=title == "docs/functions.md").connection
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


TYPED = {title: [each for each in page if each.runs] for title, page in PAGES.items()}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("title", "page"), [pytest.param(*each, id=each[0]) for each in TYPED.items() if each[1]]
)
def test_page(title: str, page: Sequence[Block], reader: Reader) -> None:
    before = dict(BEFORE.get(title, {}))
    for line in before.pop("", ()):
        reader.type(line)
    for block in page:
        if "stopped" in block.options:
            reader.stop()
        if block.kind == "python":
            reader.python(block.code, "background" in block.options)
            continue
        exits = re.search(r"exits-(\d)", block.options)
        for line, shown in block.commands:
            for each in before.pop(bare(line), ()):
                reader.type(each)
            output = reader.type(line, int(exits[1]) if exits else 0)
            # Columns may be wider.
            absent = missing(map(reader.translated, shown), output.splitlines())
            assert not absent, f"nothing like {absent[0]!r} in\n{output}"
    assert not before, "no such commands"
    reader.stop()
