"""Read-only checks of broker, level topics, movers and clocks, with remedies.

:func:`examine` runs every check and yields a finding for each, with a remedy for each problem.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rules import RULES, Problem
from delaylevel.errors import (
    AdminError,
    BrokerError,
    BrokerUnreachableError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry as topics

from . import checks
from .checks import ClusterContext, LevelTopicContext

__all__ = ["CHECKS", "Finding", "Problem", "State", "examine"]

Context = TypeVar("Context")
_AS_IT_SAYS = "do what it says (docs/lifecycle.md; for versions, docs/operations.md)"

TOPIC_CHECKS: tuple[tuple[str, Callable[[LevelTopicContext], checks.Found]], ...] = (
    ("partitions", checks.partitions),
    ("subscriptions", checks.subscriptions),
    *((name, partial(checks.rule, name)) for name in RULES),
    ("openings", checks.openings),
    ("targets", checks.targets),
    ("target schemas", checks.target_schemas),
    ("target subscriptions", checks.target_subscriptions),
    ("delayed delivery", checks.delayed_delivery),
    ("broker faults", checks.broker_faults),
    ("deduplication", checks.deduplication),
    ("mover", checks.mover),
    ("dispatcher", checks.dispatcher),
    ("pauses", checks.pauses),
    ("hand-offs", checks.lateness),
    ("producer clocks", checks.producer_clocks),
    ("held", checks.held),
    ("dead letters", checks.dead_letters),
    ("ack holes", checks.holes),
)
CLUSTER_CHECKS = ("broker", "admin rights", "clock", "level topic")
CHECKS = (*CLUSTER_CHECKS, *(name for name, _ in TOPIC_CHECKS))


class State(str, enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of one check on one subject.

    Attributes:
        note: a remark on a check without problems, or the reason why it was skipped.
        check: the check's name.
        subject: the level topic, or the cluster.
    """

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    note: str = ""
    skipped: bool = False
    check: str = ""
    subject: str = ""

    @property
    def state(self) -> State:
        """The result of the check."""
        if self.problems:
            return State.FAILED
        if self.warnings:
            return State.WARNING
        return State.SKIPPED if self.skipped else State.OK

    @property
    def says(self) -> str:
        """The first problem or warning, or the remark, in one line."""
        problems = self.problems or self.warnings
        if not problems:
            return f"not checked: {self.note}" if self.skipped else self.note
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return problems[0].says + more

    @property
    def remedies(self) -> tuple[str, ...]:
        """The remedies of all problems and warnings, without duplicates."""
        return tuple(dict.fromkeys(each.remedy for each in (*self.problems, *self.warnings)))


def examine(
    connection: Connection,
    topic: str | None = None,
    *,
    namespace: str = "public/default",
    delivery: Delivery = Delivery.AT_LEAST_ONCE,
    clock: Clock | None = None,
) -> Iterator[Finding]:
    """Run every check and yield a finding for each, in their order; nothing is changed.

    Args:
        connection: the cluster's addresses and credentials.
        topic: a business topic, its level topic, or any member topic; None for every level topic
            of the namespace.
        namespace: ``tenant/namespace`` of the level topics if no topic is given.
        delivery: the guarantee of the dispatchers, which the cluster does not know.
        clock: the clock of this machine.
    """
    if topic is not None:
        namespace = TopicName.parse(topic).namespace_path
    # Brokers that do not answer: each is a problem of the first check that needs it, and further
    # checks that need it are skipped.
    away: set[str] = set()

    def run(
        name: str, subject: str, check: Callable[[Context], checks.Found], context: Context
    ) -> Finding:
        problems: list[Problem] = []
        warnings: list[Problem] = []
        note, skipped = "", False
        try:
            for found in check(context):
                if isinstance(found, str):
                    note = found
                else:
                    (warnings if isinstance(found, checks.Warned) else problems).append(found)
        except (BrokerError, checks.NotCheckedError) as error:
            failure = _failure(error, away)
            if isinstance(failure, str):
                note, skipped = failure, True
            else:
                problems.append(failure)
        return Finding(tuple(problems), tuple(warnings), note, skipped, name, subject)

    with Admin.from_connection(connection) as admin:
        cluster = ClusterContext(connection, admin, clock or SystemClock(), delivery)
        found = run("broker", connection.admin_url, checks.broker, cluster)
        yield found
        if found.problems:
            return  # every other check needs the broker
        rights = partial(checks.rights, namespace=namespace)
        found = run("admin rights", namespace, rights, cluster)
        yield found
        yield run("clock", connection.admin_url, checks.clock, cluster)
        if found.problems and topic is None:
            return  # the level topics of the namespace cannot be listed; one that is named can
        descriptions: list[LevelTopicDescription] = []
        find = partial(_level_topics, topic, namespace, descriptions)
        yield run("level topic", topic or namespace, find, cluster)
        for description in descriptions:
            context = LevelTopicContext(cluster, description)
            for name, check in TOPIC_CHECKS:
                yield run(name, description.topic, check, context)


def _level_topics(
    topic: str | None,
    namespace: str,
    served: list[LevelTopicDescription],
    cluster: ClusterContext,
) -> checks.Found:
    """Find the level topics to examine, and add them to a list."""
    admin = cluster.admin
    if topic is not None:
        try:
            served.append(topics.describe(admin, topic, search=True))
            yield served[0].topic
        except (LevelTopicError, NotFoundError) as error:
            yield Problem(str(error), _AS_IT_SAYS)
        return
    found = topics.list_level_topics(admin, namespace)
    if not found:
        raise checks.NotCheckedError(f"there is no level topic in {namespace}")
    for item in found:
        if item.description is not None:
            served.append(item.description)
        else:
            yield Problem(f"{item.topic}: {item.problem}", _AS_IT_SAYS)
    yield f"{len(served)} level topics"


def _failure(error: BrokerError | checks.NotCheckedError, away: set[str]) -> Problem | str:
    """Return the problem of a failed request, or the reason why its check is skipped."""
    if isinstance(error, checks.NotCheckedError):
        return str(error)
    if isinstance(error, PermissionDeniedError):
        return f"the token has no permission ({error.reason})"
    if isinstance(error, BrokerUnreachableError):
        if not error.address:
            return Problem(str(error), checks.START)
        if error.address in away:
            return f"the broker at {error.address} does not answer"
        away.add(error.address)
        return Problem(
            str(error), "then run doctor again: checks that need this broker are skipped now"
        )
    if isinstance(error, NotFoundError):
        return f"deleted during the check: {error.reason}"
    if isinstance(error, AdminError) and error.status >= 500:
        # The broker does not know the fact, which says nothing about it.
        return f"{error}; the broker's own log has details"
    return Problem(str(error), "try again; the broker's own log has details")
