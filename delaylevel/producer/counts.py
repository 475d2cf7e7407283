"""The level topic of a producer without admin access, found and checked by partition counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pulsar

from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName


class PartitionCounts:
    """Numbers of partitions of topics, as the Pulsar client reports them.

    Args:
        partitions_of: the client's ``get_topic_partitions``.
    """

    def __init__(self, partitions_of: Callable[[str], Sequence[str]]) -> None:
        self._partitions_of = partitions_of

    def choose(self, wanted: LevelTopicDescription, names: Sequence[str]) -> LevelTopicDescription:
        """Return the level topic that exists under one of the names, checked by its counts.

        All names are looked at. Some brokers create a topic that a client looks up, so a topic that
        exists is a level topic only if the counts of its member topics are right, too.

        Args:
            wanted: the description according to the producer's arguments.
            names: the names to look for, that of a new level topic first.

        Raises:
            LevelTopicError: none exists with these levels, or several do.
        """
        candidates = [replace(wanted, topic=name) for name in names]
        found: list[LevelTopicDescription] = []
        problems: list[tuple[bool, Exception]] = []
        for candidate in candidates:
            try:
                found.append(self._checked(candidate))
            except LevelTopicError as error:
                problems.append((self._count(candidate.topic) == 0, error))
            except pulsar.PulsarException as error:
                if len(candidates) == 1:
                    raise
                problems.append((True, error))  # for example, no rights on a topic of this name
        if len(found) > 1:
            both = " and ".join(item.topic for item in found)
            raise LevelTopicError(
                f"{both} exist with these partitions, and without an admin_url a producer does not "
                f"know which one is the level topic of {wanted.targets[0]}: name it "
                "(delay_level_topic=…)"
            )
        if found:
            return found[0]
        # Of a level topic with other levels, the counts tell what is wrong.
        raise min(problems, key=lambda problem: problem[0])[1]

    def _checked(self, description: LevelTopicDescription) -> LevelTopicDescription:
        """Check the counts of the levels; return the description with the window's count."""
        for level in description.levels:
            topic = description.level_topic(level.index).full
            count = self._count(topic)
            if count != level.partitions:
                has = f"has {count} partitions" if count else "does not exist or is not partitioned"
                raise LevelTopicError(
                    f"level topic {topic} {has}; the strategy ({description.levels}) needs "
                    f"{level.partitions}. Create it with `{creation_command(description)}`; if it "
                    "was expanded, name the longer maximum_delay; or give the client an admin_url, "
                    "so that it can read and create level topics"
                )
        if description.final_window is not FinalWindow.TRACKER:
            return description
        topic = description.window_topic.full
        count = self._count(topic)
        if not count:
            raise LevelTopicError(
                f"window topic {topic} does not exist or is not partitioned: name the final_window "
                f"of level topic {description.topic} (final_window='broker'), or give the client "
                "an admin_url, so that it can read it"
            )
        return replace(description, window_partitions=count)

    def _count(self, topic: str) -> int:
        try:
            found = list(self._partitions_of(topic))
        except pulsar.TopicNotFound:
            return 0  # the answer for a namespace that does not exist
        return 0 if found == [topic] else len(found)


def creation_command(description: LevelTopicDescription) -> str:
    """Return the command that creates a level topic, without its strategy."""
    target = description.targets[0]
    command = f"delaylevel levels create {target}"
    namespace = description.name.namespace_path
    if namespace != TopicName.parse(target).namespace_path:
        command += f" --level-namespace {namespace}"
    return command
