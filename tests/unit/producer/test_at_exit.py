"""Tests of the end of a process that has not closed its producers."""

from __future__ import annotations

import threading
import time

from delaylevel.producer.client_calls import Exit


class LastCallback:
    """Outstanding work whose outcome is known before the client's thread leaves its callback."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self._entered = threading.Event()

    def run(self) -> None:
        self._entered.set()
        time.sleep(0.002)  # the way out of the callback
        self.left.set()

    def is_outstanding(self) -> bool:
        return not self._entered.is_set()


def test_the_exit_lets_the_last_callback_end() -> None:
    """The process aborts if Python shuts down while the client's thread runs Python code."""
    end, callback = Exit(), LastCallback()
    end.expect_callbacks()
    end.wait_for(callback)
    thread = threading.Thread(target=callback.run)
    thread.start()
    end.finish()
    assert callback.left.is_set()
    thread.join()
