"""The level topics that a process is to serve, and those of them that it cannot serve now."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from delaylevel.cluster.failures import may_pass, translate_errors
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import BrokerError, DelayLevelError, InvalidInputError, LevelTopicError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from . import registry

log = logging.getLogger(__name__)

_LOOK_S = 5.0
# A search for level topics of other names asks for each topic of the namespace. A topic that is no
# level topic becomes one only if it is deleted and created again.
_SEARCH_S = 60.0


class Roster:
    """The level topics that were named, and all of a namespace.

    One that cannot be served, such as one in a later format, is reported, and does not keep the
    process from serving the others. It is tried again every few seconds; one of another than the
    default name is searched for once a minute.

    Args:
        names: names of business topics or level topics.
        serve: function that begins to serve a level topic. Its second argument is True if the level
            topic was named. It raises BrokerError or InvalidInputError if that is not possible.
        namespace: ``tenant/namespace`` whose level topics are all to be served, also later ones.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        names: Sequence[str],
        serve: Callable[[LevelTopicDescription, bool], None],
        namespace: str | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admin = admin
        self._names = tuple(dict.fromkeys(names))
        self._serve = serve
        self._namespace = namespace
        self._now_s = now_s
        self._look_s = float("-inf")
        self._search_s = float("-inf")
        self._found: dict[str, str] = {}  # name -> level topic
        # The member topics of each level topic that was served, and other topics of the namespace
        # with the times at which they are looked at again: full names.
        self._members: dict[str, frozenset[str]] = {}
        self._others: dict[str, float] = {}
        self._refused: dict[str, DelayLevelError] = {}
        self._warning = RepeatedWarning(log, f"level topics of {namespace}")

    @property
    def errors(self) -> Mapping[str, DelayLevelError]:
        """The error of each level topic that cannot be served now, by its name."""
        return self._refused.copy()

    @property
    def refused(self) -> Mapping[str, str]:
        """The reason for each level topic that cannot be served now, by its name."""
        return {name: str(error) for name, error in self.errors.items()}

    @property
    def named_refused(self) -> Mapping[str, str]:
        """The part of `refused` that was named, not found in the namespace."""
        return {name: reason for name, reason in self.refused.items() if name in self._names}

    def start(self) -> None:
        """Begin to serve the level topics.

        Raises:
            DelayLevelError: the first reason, if none of those that were named can be served; or
                the namespace cannot be read.
        """
        self._look_s = self._now_s() + _LOOK_S
        self._look_at_named(frozenset())
        if self._names and len(self._refused) == len(self._names):
            raise next(iter(self._refused.values()))
        if self._namespace is not None:
            served = frozenset(
                self._found[name] for name in self._found if name not in self._refused
            )
            self._look_at_namespace(served)

    def look(self, served: Iterable[str]) -> Sequence[str]:
        """Begin to serve what can be served now; once in a few seconds.

        Args:
            served: full names of the level topics that the process serves.

        Returns:
            The full names of those that were deleted from the namespace.
        """
        if self._now_s() < self._look_s:
            return ()
        self._look_s = self._now_s() + _LOOK_S
        known = frozenset(served)
        self._look_at_named(known)
        if self._namespace is None:
            return ()
        try:
            gone = self._look_at_namespace(known)
        except BrokerError as error:
            self._warning.failed(error)
            return ()
        self._warning.over()
        return gone

    def refuse(self, name: str, error: DelayLevelError) -> None:
        """Note that a level topic cannot be served now."""
        name = next((given for given, topic in self._found.items() if topic == name), name)
        if str(self._refused.get(name)) != str(error):
            log.warning("level topic %s is not served: %s", name, error)
        self._refused[name] = error

    def forget(self, name: str) -> None:
        """Stop trying to serve a level topic that was not named."""
        self._refused.pop(name, None)

    def _look_at_named(self, served: frozenset[str]) -> None:
        """Look at those that were named, and at those that were given up since."""
        more = () if self._namespace is not None else tuple(self._refused)
        now = set(served)
        searching = self._now_s() >= self._search_s
        if searching:
            self._search_s = self._now_s() + _SEARCH_S
        for name in dict.fromkeys((*self._names, *more)):
            if self._found.get(name, name) in now:
                continue
            with self._trying(name):
                known = self._refused.get(name)
                if known is not None and not searching and not may_pass(known):
                    topic = TopicName.parse(name).without_partition
                    if not registry.without_search(self._admin, topic):
                        raise known.with_traceback(None)
                description = registry.describe(self._admin, name, search=True)
                self._found[name] = description.topic
                if description.topic not in now:
                    self._serve(description, True)
                    now.add(description.topic)

    def _look_at_namespace(self, served: frozenset[str]) -> Sequence[str]:
        """Look at those of the namespace, and return those that were deleted.

        Raises:
            BrokerError: the namespace cannot be read.
        """
        assert self._namespace is not None
        with translate_errors():
            names = registry.partitioned_topics(self._admin, self._namespace)
            listed = registry.level_topics_of(self._admin, self._unknown(names, served))
        found = {item.topic for item in listed}
        again_s = self._now_s() + _SEARCH_S
        for name in names:
            if name.full not in found and name.full not in served:
                self._others.setdefault(name.full, again_s)
        for item in listed:
            with self._trying(item.topic):
                if item.description is None:
                    raise LevelTopicError(item.problem or item.topic)
                self._serve(item.description, False)
                self._members[item.topic] = frozenset(
                    member.topic.full for member in item.description.members()
                )
        for gone in [name for name in self._refused if name not in (*self._names, *found)]:
            self.forget(gone)
        return sorted(served - {name.full for name in names})

    def _unknown(self, names: Sequence[TopicName], served: frozenset[str]) -> list[TopicName]:
        """Return the topics that may be level topics to serve.

        Requests for all the others, again and again, would cost more than all other work at rest.
        """
        for topic in self._members.keys() - served:
            del self._members[topic]
        now_s, there = self._now_s(), {name.full for name in names}
        self._others = {
            name: again_s
            for name, again_s in self._others.items()
            if name in there and again_s > now_s
        }
        known = served.union(self._others, *self._members.values())
        return [name for name in names if name.full not in known]

    @contextlib.contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        """Note the error of an attempt to serve a level topic, or that it is served now."""
        try:
            with translate_errors():
                yield
        except (BrokerError, InvalidInputError) as error:
            self.refuse(name, error)
            return
        if self._refused.pop(name, None) is not None:
            log.info("level topic %s is served now", name)
