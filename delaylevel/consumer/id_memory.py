"""The IDs of handled messages, and of those that are being handled.

Not in the module of the option: this one needs NumPy, which an application without deduplication
does not install.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from delaylevel.structures.deduplicator import Deduplicator
from delaylevel.structures.id_set import Ids

from .ids import IdLog, InvalidIdError, key_of

log = logging.getLogger(__name__)

_KEY = "handled"
_FLUSH_S = 30.0


class HandledIds:
    """Handled IDs of one subscription; any number of threads and coroutines may use it.

    For each message: `begin`; then, unless `contains` returns True, the handler; then `save` before
    the acknowledgement, or `release` if the message was not handled with success.

    A caller must not wait for a message that another one is handling while it has begun a message
    that is neither saved nor released: two callers could wait for each other, and one for itself.
    """

    def __init__(
        self, by: Callable[[Any], Any] | None, capacity: int, id_log: IdLog | None = None
    ) -> None:
        """Load the stored IDs.

        Args:
            by, capacity: as for :class:`~delaylevel.consumer.deduplication.Deduplication`.
            id_log: the open store; None to remember IDs in memory only. It is closed here.
        """
        self._by = by
        self._lock = threading.Lock()
        self._handled = Deduplicator(capacity)
        # By ID that is being handled: the functions to call when that has ended.
        self._in_progress: dict[int, list[Callable[[], object]]] = {}
        # By identity of a message that was begun. The function for IDs is called only once: its
        # answer may be different after the handler has changed the message.
        self._keys: dict[int, int] = {}
        self._log = id_log
        self._closed = False
        if id_log is not None:
            try:
                id_log.start(self)
            except BaseException:
                id_log.close()
                raise

    def __len__(self) -> int:
        """Return the number of remembered IDs."""
        return len(self._handled)

    @property
    def unsaved(self) -> int:
        """Number of handled IDs that the store does not have yet."""
        return 0 if self._log is None else self._log.unsaved

    def begin(self, message: Any, ended: Callable[[], object] | None = None) -> bool:
        """Claim the ID of a message; return False while a message with the same ID has the claim.

        Args:
            message: the received message.
            ended: function to call when the other message is saved or released; the caller then
                calls `begin` again. It is called once, in the thread that saves or releases: it
                must not block or raise. A thread passes the ``set`` of a ``threading.Event``, a
                coroutine a ``call_soon_threadsafe``.

        Raises:
            InvalidIdError: the application's function returned no ID. The message was not claimed;
                its handling has failed.
            Exception: any error of that function.
        """
        key = self._key_of(message)
        with self._lock:
            waiting = self._in_progress.get(key)
            if waiting is not None:
                if ended is not None:
                    waiting.append(ended)
                return False
            self._in_progress[key] = []
            self._keys[id(message)] = key
        return True

    def contains(self, message: Any) -> bool:
        """Return True if a message with this ID was handled with success; errors as for `begin`.

        The answer stays true only for a message that was begun: no other one is handled meanwhile.
        """
        key = self._keys.get(id(message))
        if key is None:
            key = self._key_of(message)
        with self._lock:
            return self._handled.is_duplicate(key, _KEY)

    def save(self, message: Any, saved: Callable[[], object] | None = None) -> None:
        """Save the ID of a message that was handled; acknowledge the message only afterwards.

        If the store does not take the ID, that is logged, and the message is acknowledged all the
        same: left unacknowledged, it would certainly be handled again.

        Args:
            message: the message, as given to `begin`.
            saved: function to call when the ID is saved, in this thread or one of the client: it
                must not block or raise. Without it, this call waits, for a store on a topic until
                the broker has confirmed.
        """
        key = self._keys.pop(id(message), None)
        if key is None:
            key = self._key_of(message)
        with self._lock:
            self._handled.save(key, _KEY)
            waiting = self._in_progress.pop(key, ())
        _call(waiting)
        if self._log is None:
            if saved is not None:
                saved()
        elif saved is not None:
            self._log.append(key, saved)
        else:
            done = threading.Event()
            self._log.append(key, done.set)
            done.wait()

    def release(self, message: Any) -> None:
        """End the claim on the ID of a message that was not handled with success, if it has one."""
        key = self._keys.pop(id(message), None)
        if key is None:
            return
        with self._lock:
            waiting = self._in_progress.pop(key, ())
        _call(waiting)

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until the store has every ID; return False if it does not within the time, in s."""
        return self._log is None or self._log.flush(timeout_s)

    def close(self) -> None:
        """Flush and close the store; log it if IDs are lost. A second call does nothing."""
        if self._log is None or self._closed:
            return
        self._closed = True
        if not self._log.flush(_FLUSH_S):
            log.error(
                "%d IDs of handled messages could not be stored, and are forgotten at the end of "
                "this process: copies of these messages would be handled again",
                self._log.unsaved,
            )
        self._log.close()

    # -- the memory, as the store sees it

    def add(self, ids: Ids) -> None:
        """Remember IDs that were saved earlier, or by another process."""
        with self._lock:
            if len(self._handled):
                ids = ids[~self._handled.are_duplicates(ids, _KEY)]
            self._handled.save_all(ids, _KEY)

    def ids(self) -> Ids:
        """Return the remembered IDs, the older generation first."""
        with self._lock:
            return self._handled.ids(_KEY).astype(np.uint64)

    def _key_of(self, message: Any) -> int:
        by = self._by
        try:
            return key_of(message.identity if by is None else by(message))
        except InvalidIdError as error:
            source = getattr(by, "__qualname__", repr(by)) if by else "message.id"
            raise InvalidIdError(
                f"the ID for deduplication, from {source}, was {error}: it must be a text that is "
                "not empty, or an integer of 64 bits"
            ) from None


def _call(functions: Any) -> None:
    for function in functions:
        try:
            function()
        except Exception:
            log.exception("a function that waits for the end of another handling has failed")
