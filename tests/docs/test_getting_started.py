"""docs/getting-started.md, step by step as a reader would, on a real broker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from delaylevel.config import Connection

PAGE = Path(__file__).parents[2] / "docs/getting-started.md"
BLOCK = re.compile(
    r"^```(?P<kind>sh|python)(?P<options>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
# A start of Spark takes ten seconds alone, and minutes on a machine that is busy.
PATIENCE_S = 400


def _blocks() -> list[tuple[str, str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    return [(m["kind"], m["options"].strip(), m["code"]) for m in BLOCK.finditer(text)]


def test_what_is_not_run_is_what_a_test_cannot_do() -> None:
    left_out = "".join(code for _, options, code in _blocks() if options == "no-run")
    assert {line.split()[0] for line in left_out.splitlines()} == {"python3", "pip", "delaylevel"}
    assert "delaylevel broker start" in left_out
    assert len(_blocks()) == 8


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_the_page_as_it_stands(connection: Connection, namespace: str, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DELAYLEVEL_SERVICE_URL": connection.service_url,
        "DELAYLEVEL_ADMIN_URL": connection.admin_url,
        "PYTHONUNBUFFERED": "1",
        **{f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("STATE", "CONFIG", "CACHE")},
    }
    running: list[subprocess.Popen[bytes]] = []
    outputs = []

    def stop() -> None:
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait(PATIENCE_S)
        running.clear()

    try:
        for number, (kind, options, code) in enumerate(_blocks()):
            # The same topic, in a namespace of the test's own.
            code = re.sub(r'(?<=[ "])reminders\b', f"persistent://{namespace}/reminders", code)
            if options == "no-run":
                continue
            if options == "stopped":
                stop()
            words = ["sh", "-e", "-c", code] if kind == "sh" else [sys.executable, "-c", code]
            if options == "background":
                log = (tmp_path / f"{number}.log").open("wb")
                words[-1] = f"exec {code}"
                running.append(
                    subprocess.Popen(
                        words, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
                    )
                )
                continue
            done = subprocess.run(
                words,
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
            outputs.append(done.stdout)
    finally:
        stop()
    said = next(text for text in outputs if "at once" in text)
    # Among the lines that the client itself logs.
    found = re.findall(r"^ ?(\d+\.\d) s  (.+)$", said, re.MULTILINE)
    seconds = {words: float(at) for at, words in found}
    # On a machine that is busy the other two may be late, and then in any order.
    assert found[0][1] == "at once"
    assert set(seconds) == {"at once", "in three seconds", "in twelve seconds"}
    assert seconds["in twelve seconds"] >= 11.9, "early"
    assert seconds["in three seconds"] >= 2.9, "early"
