"""Further processes of one dispatcher, so that one command uses several cores.

Each process is a dispatcher of its own in the group, and the group shares the window partitions as
between machines. The process that was started by hand watches the others: it starts one again that
has ended or hangs, ends with all of them, and answers for all of them.

Between the two there is a pipe. The other process pushes a report every second, and answers
requests. When the pipe breaks, it ends: no process outlives the one that watches it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from delaylevel.cluster.threads import stop_on_signals
from delaylevel.errors import BrokerError, DelayLevelError
from delaylevel.web.reports import LiveAnswer, QueryRefusedError, Reporter

from .stats import OwnerStats

log = logging.getLogger(__name__)

#: A process that has reported nothing for so long hangs.
HUNG_S = 60.0
#: Time in which the processes of a command join a group. Until then, none takes another's share.
JOINING_S = 20.0
# Time to start the interpreter, to connect and to make the first report, on a busy machine.
_START_S = 120.0
_STOP_S = 20.0
_ANSWER_S = 10.0
# A longer time between two looks means that this process was suspended, and perhaps all of them.
_LONGEST_LOOK_S = 10.0
# Pause before an ended process is started again.
_PAUSE_S = 5.0
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")

StatsByPartition = dict[tuple[str, int], OwnerStats]


#: Given its name in the group and the names of all processes, opens the service of a further
#: process (with ``dispatcher``, ``run`` and ``stop``), and what answers for it. It travels to a
#: new interpreter: a function of a module, or a partial.
Opener = Callable[[str, Sequence[str]], tuple[Any, Sequence[Reporter]]]


_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def usable_cores() -> int:
    """Return the number of cores that this process may use, with the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError, ValueError):
        quota, period = _CPU_LIMIT.read_text().split()
        cores = min(cores or 1, int(quota) // int(period))  # "max" is no number
    return max(1, cores or 1)


def tune_interpreter() -> None:
    """Prepare the interpreter for a dispatcher."""
    # The publishing thread must not wait the default 5 ms for its turn in the interpreter.
    sys.setswitchinterval(0.001)
    # Messages are freed without the garbage collector, which would look at all of them, and at all
    # modules, many times a second.
    gc.freeze()
    gc.set_threshold(100_000)
    # glibc opens up to eight arenas for each core, and each keeps what was freed in it. Payloads
    # move between threads, so a million pending messages took half as much memory again. With
    # fewer arenas than this, threads wait for each other.
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(_ARENA_MAX, usable_cores() + 2)


class _Child:
    """One further process, as long as it runs, and what it has reported."""

    def __init__(self, name: str, siblings: Sequence[str], opener: Opener, url: str) -> None:
        self.name = name
        self.stats: StatsByPartition = {}
        self.released = Counter[str]()
        self.silent_s = 0.0  # time since it last looked at all its level topics
        self.begun_s = time.monotonic()
        self.heard_s = self.begun_s + _START_S - HUNG_S
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._sending = threading.Lock()
        # A new interpreter, not a fork: this process has threads and connections.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, opener, name, tuple(siblings), url
        self.process = context.Process(target=work, args=arguments, name=name, daemon=True)
        self.process.start()
        theirs.close()
        threading.Thread(target=self._read, name=f"process {name}", daemon=True).start()

    def request(self, *request: Any) -> Any:
        """Return the answer to a request; raise its error, or BrokerError if none comes."""
        number, answer = next(self._numbers), queue.SimpleQueue[Any]()
        self._answers[number] = answer
        try:
            with self._sending:
                self._pipe.send((number, *request))
            found = answer.get(timeout=_ANSWER_S)
        except (OSError, queue.Empty):
            raise BrokerError(f"process {self.name} does not answer") from None
        finally:
            del self._answers[number]
        if isinstance(found, Exception):
            raise found
        return found

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, value = self._pipe.recv()
                if number is not None:
                    if (waiting := self._answers.get(number)) is not None:
                        waiting.put(value)
                    continue
                # Only statistics that have changed travel.
                stats, self.released, self.silent_s = value
                self.stats = {key: each or self.stats[key] for key, each in stats.items()}
                self.heard_s = time.monotonic()


class Processes:
    """The further processes of a dispatcher.

    `start`, `look` and `stop` are called by one thread; the others by any.

    Args:
        opener: opens what each of them runs; None without any.
        count: number of processes with this one; 0 for one for each usable core.
    """

    def __init__(self, opener: Opener | None, count: int) -> None:
        self._opener = opener
        self._count = count or usable_cores()
        self.names: list[str] = []  # of all processes, this one included, once they are started
        self._children: dict[str, _Child] = {}
        self._looked_s = time.monotonic()
        self._again_s: dict[str, float] = {}
        # Messages released by processes that have ended since.
        self._released: Counter[str] = Counter()
        # Address of the HTTP service, which the processes publish as theirs when they start.
        self.url = ""

    def start(self, name: str, most: int) -> tuple[str, ...]:
        """Start them, at most ``most`` with this one, and return the names of all processes."""
        # More processes than window partitions would have nothing to do.
        further = range(2, min(self._count, most) + 1)
        self.names = [name, *(f"{name}-{number}" for number in further)]
        for each in self.names[1:]:
            self._begin(each)
        return tuple(self.names)

    def look(self) -> None:
        """Start those again that have ended or hang."""
        now_s = time.monotonic()
        suspended_s = max(now_s - self._looked_s - _LONGEST_LOOK_S, 0.0)
        self._looked_s = now_s
        for name, child in list(self._children.items()):
            child.heard_s += suspended_s
            if now_s - child.heard_s > HUNG_S:
                log.warning("process %s reports nothing: it is killed", name)
                child.process.kill()
                child.process.join(_STOP_S)
            if not child.process.is_alive():
                self._take_leave(name)
                self._try_again(name, f"has ended (exit code {child.process.exitcode})")
        for name, again_s in list(self._again_s.items()):
            if now_s >= again_s:
                del self._again_s[name]
                self._begin(name)

    def request_stop(self) -> None:
        """Let them end; `join` waits for it."""
        self._again_s.clear()
        for child in self._children.values():
            child.process.terminate()  # it may be busy with an answer, so not through the pipe

    def join(self) -> None:
        """Wait until they have ended; kill those that do not."""
        until_s = time.monotonic() + _STOP_S
        for name, child in list(self._children.items()):
            child.process.join(max(0.0, until_s - time.monotonic()))
            if child.process.is_alive():
                log.warning("process %s does not end: it is killed", name)
                child.process.kill()
                child.process.join()
            self._take_leave(name)

    def stats(self) -> StatsByPartition:
        """Return the statistics of their window partitions, some tenths of a second old."""
        return {key: each for child in self._running() for key, each in child.stats.items()}

    def released(self) -> Counter[str]:
        """Return the number of messages that they have released, by level topic."""
        return sum((child.released for child in self._running()), self._released.copy())

    @property
    def starting(self) -> int:
        """Number of processes that have begun a moment ago, and own nothing yet."""
        now_s = time.monotonic()
        return sum(not c.stats and now_s < c.begun_s + JOINING_S for c in self._running())

    @property
    def silent_s(self) -> float:
        """Longest time since one of them looked at all its level topics, in s."""
        now_s = time.monotonic()
        return max((c.silent_s + now_s - c.heard_s for c in self._running()), default=0.0)

    def ask(self, question: str, parameters: Mapping[str, str]) -> list[LiveAnswer]:
        """Return the answers to a live query, of those that have any."""
        found = []
        for child in self._running():
            with suppress(QueryRefusedError, BrokerError):
                found.append(child.request(question, dict(parameters)))
        return found

    def answer(self, name: str, question: str, parameters: Mapping[str, str]) -> LiveAnswer | None:
        """Return the answer of one process to a live query; None if there is no such process."""
        child = self._children.get(name)
        if child is None:
            return None
        try:
            answer: LiveAnswer = child.request(question, dict(parameters))
        except BrokerError as error:
            raise QueryRefusedError(str(error), 503) from None
        return answer

    def _running(self) -> Iterable[_Child]:
        return list(self._children.values())

    def _begin(self, name: str) -> None:
        assert self._opener is not None
        try:
            self._children[name] = _Child(name, self.names, self._opener, self.url)
        except (OSError, RuntimeError) as error:  # too many processes, or no memory left
            self._try_again(name, f"cannot be started ({error})")

    def _try_again(self, name: str, why: str) -> None:
        """Start a process after a pause."""
        self._again_s[name] = time.monotonic() + _PAUSE_S
        log.warning("process %s %s: it is started again in %.0f s", name, why, _PAUSE_S)

    def _take_leave(self, name: str) -> None:
        self._released += self._children.pop(name).released


def work(pipe: Pipe, opener: Opener, name: str, siblings: Sequence[str], url: str) -> None:
    """Run a further process until it is asked to end, or the pipe breaks."""
    tune_interpreter()
    sending = threading.Lock()
    sent: StatsByPartition = {}
    try:
        service, reporters = opener(name, siblings)
    except DelayLevelError as error:
        log.warning("process %s: %s", name, error)
        raise SystemExit(1) from None
    for reporter in reporters:
        if url:
            reporter.served_at(url)
    stop_on_signals(service.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that watches

    def send(number: int | None, value: Any) -> None:
        with sending, suppress(OSError):
            pipe.send((number, value))

    def push() -> None:
        # A service that does not move has a dispatcher from the start.
        dispatcher = service.dispatcher
        stats = dispatcher.stats()
        changed = {key: None if sent.get(key) is s else s for key, s in stats.items()}
        sent.clear()
        sent.update(stats)
        send(None, (changed, dispatcher.released(), dispatcher.silent_s))

    def serve() -> None:
        with suppress(EOFError, OSError):
            while True:
                number, *request = pipe.recv()
                send(number, _answer(reporters, *request))
        service.stop()

    threading.Thread(target=serve, name="requests", daemon=True).start()
    service.run(push)
    push()


def _answer(
    reporters: Sequence[Reporter], question: str, parameters: Mapping[str, str]
) -> LiveAnswer | QueryRefusedError:
    """Return the answer to a live query, or the error to be raised in the other process."""
    try:
        for reporter in reporters:
            if (answer := reporter.answer(question, parameters)) is not None:
                return answer
    except QueryRefusedError as error:
        return error
    except Exception:
        log.exception("live query %s", question)
        return QueryRefusedError("the answer failed: the log of the dispatcher has the reason", 503)
    return QueryRefusedError("this process has no window of a level topic to ask", 404)
