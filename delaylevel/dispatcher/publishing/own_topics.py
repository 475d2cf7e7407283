"""Topics of our own, to which an owner sends messages until they are stored."""

from __future__ import annotations

import logging
from typing import TypeVar

from delaylevel.cluster.failures import TOO_LARGE
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.dispatcher.host import Host
from delaylevel.mover.carrier import Carried, OwnPlaces

log = logging.getLogger(__name__)

Item = TypeVar("Item")
# Pause before messages that were not stored are sent again.
_RETRY_S = 1.0


class OwnTopics(OwnPlaces[Item]):
    """Topics of our own; what they do not store is sent again. Warnings are about ``name``."""

    def __init__(self, host: Host, name: str) -> None:
        super().__init__(host.client, host.admin, host.descriptions.latest, host.clock, host.loop)
        self._again: list[Carried[Item]] = []
        self._again_s = 0.0
        self._warning = RepeatedWarning(log, name)

    @property
    def load(self) -> tuple[int, int]:
        """Number and bytes of the messages that are not confirmed."""
        messages, size = super().load
        return messages + len(self._again), size + sum(each.size for each in self._again)

    def confirmed(self) -> list[Carried[Item]]:
        """Return the messages that are stored or dropped, or would always be too large."""
        # If the owner gave up instead of sending them again, the next one would publish the
        # messages in flight of every target again.
        if self._again and self._now_s() >= self._again_s:
            again, self._again = self._again, []
            for carried in again:
                carried.reason = ""
                self.put(carried)
            self.flush()
        found: list[Carried[Item]] = []
        for carried in self.poll():
            if carried.reason and carried.reason != TOO_LARGE:
                topic, reason = carried.place.topic, carried.reason
                text = f"{topic} did not confirm a message ({reason}): it is sent again"
                self._warning.failed(text)
                self._again.append(carried)
                self._again_s = self._now_s() + _RETRY_S
                continue
            if not self._again:
                self._warning.over()
            found.append(carried)
        self.flush()  # what was too large for the held topic
        return found
