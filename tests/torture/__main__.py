"""``python -m torture``: one run; `make torture` calls it."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from delaylevel.errors import DelayLevelError

from .faults import named
from .run import Torture
from .scene import Scene, StageError
from .stage import stages


def main() -> int:
    """Run, show the result, and return the exit code: 0 if everything that is promised was kept."""
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="time with faults")
    parser.add_argument("--seed", type=int, default=0, help="seed; 0 for a random one")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--faults", default="", help="kinds of faults; all by default")
    given = parser.parse_args()
    seed = given.seed or random.SystemRandom().randrange(1, 1 << 30)
    # The seed decides about the guarantee of `dispatcher run` (`run` has the other one), and about
    # a broker with tokens that expire, without Java and the Function.
    decided = random.Random(seed)
    once, tokens = decided.random() < 0.7, decided.random() < 0.3
    try:
        faults = named(tuple(filter(None, given.faults.split(","))))
    except ValueError as error:
        parser.error(str(error))
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {line}", file=sys.stderr, flush=True)

    say(f"seed {seed}, logs in {folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    keep = True
    try:
        scene = Scene(folder, stages(once, function=not tokens), seed, say, tokens)
        result = Torture(scene, faults, given.minutes).run()
        keep = not result.ok
    except KeyboardInterrupt:
        keep = False
        return 130
    except (DelayLevelError, StageError) as error:
        say(f"the run failed: {error}")
        return 2
    finally:
        if keep:
            say(f"logs and ledgers are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(result.as_json())
    print(result.as_json())
    say("everything that is promised was kept" if result.ok else "FAILED")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
