"""Questions of other threads to the thread that changes a delay queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class QueueQuestion(Generic[Answer]):
    """A function of a delay queue that the owner's thread calls once, between two of its steps.

    Args:
        function: function of the queue, which has to be short.
        discard: function that is called with an answer that comes too late.
    """

    def __init__(
        self, function: Callable[[Any], Answer], discard: Callable[[Answer], None]
    ) -> None:
        self._function = function
        self._discard = discard
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def answer(self, delay_queue: Any) -> None:
        """Call the function; the owner's thread does, and no error reaches it."""
        with self._lock:
            if self._given_up:
                return
            try:
                self._answer = self._function(delay_queue)
            except Exception as error:
                self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> Answer | None:
        """Return the answer, or raise the error of the function; None after a time, in s."""
        self._done.wait(max(timeout_s, 0))
        with self._lock:
            self._given_up = True
            answer, self._answer = self._answer, None
        if self._error is not None:
            raise self._error
        return answer

    def give_up(self) -> None:
        """Drop the answer, whether it has come or not."""
        answer = self.wait(0)
        if answer is not None:
            self._discard(answer)


def answered(
    ask: Callable[[QueueQuestion[Any]], None],
    timeout_s: float,
    function: Callable[[Any], Any],
    discard: Callable[[Any], None],
) -> Any:
    """Pass a question to the thread, and return its answer; None after a time, in s."""
    question = QueueQuestion(function, discard)
    ask(question)
    try:
        return question.wait(timeout_s)
    finally:
        question.give_up()
