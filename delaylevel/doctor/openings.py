"""The check that tries what producers, movers and dispatchers have to open."""

from __future__ import annotations

from contextlib import closing, suppress

from delaylevel.cluster import logs, trials
from delaylevel.cluster.rules import violations
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.cluster.trials import Trial
from delaylevel.errors import BrokerError, PermissionDeniedError
from delaylevel.model.level_topic import Member
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.members import metadata_of

from .context import LevelTopicContext
from .finding import CheckResult, Problem

# The client tries again and again for its operation timeout where an encryption is required.
_PATIENCE_S = 10
#: Somebody else was faster to open it: it can be opened.
_BUSY = "ConsumerBusy"
#: The topic wants its schema, and each message has a producer that declares it.
_NEEDS_SCHEMA = "IncompatibleSchema"
_DENIED = ("AuthorizationError", "AuthenticationError")


def openings(context: LevelTopicContext) -> CheckResult:
    """Check that each kind of producer, consumer and reader of ours can be opened.

    It uses the rights of the caller. A lock of a running process is left alone.
    """
    connection = context.cluster.connection
    patience_s = min(_PATIENCE_S, connection.operation_timeout_seconds)
    wanted = _trials(context)
    opening = connection.open_client(operation_timeout_seconds=patience_s, logger=logs.silent())
    with closing(opening) as client:
        failures = context.cluster.in_parallel(lambda trial: trial.failure(client), wanted)
    problems, denied = [], []
    for trial, failure in zip(wanted, failures, strict=True):
        if failure in _DENIED:
            says = f"this role may not open a {trial.what} of {trial.topic}"
            denied.append(Problem(says, _GRANT))
        elif failure and failure not in (_BUSY, _NEEDS_SCHEMA):
            says = f"no {trial.what} of {trial.topic} can be opened ({failure})"
            problems.append(Problem(says, _remedy(context, failure)))
    return CheckResult(tuple(problems), f"{len(wanted)} tried", warnings=tuple(denied))


_GRANT = (
    "if movers or dispatchers have this role, grant it what docs/security.md lists; otherwise run "
    "doctor with their credentials"
)


def _trials(context: LevelTopicContext) -> list[Trial]:
    """Return what can be tried; topics that this role may not even look at are left out."""
    admin, description = context.admin, context.description

    def of_member(member: Member) -> list[Trial]:
        try:
            if metadata_of(admin, member.topic) is None:
                return []  # the finding of another check
            return list(trials.trials_of_member(admin, description, member.topic, member.role))
        except PermissionDeniedError:
            return []

    def of_target(name: str) -> list[Trial]:
        try:
            found = topic_stats(admin, TopicName.parse(name))
        except PermissionDeniedError:
            return []
        return [trials.trial_of_target(min(found, key=str))] if found else []

    in_parallel = context.cluster.in_parallel
    found = in_parallel(of_member, context.members) + in_parallel(of_target, description.targets)
    return [trial for each in found for trial in each]


def _remedy(context: LevelTopicContext, failure: str) -> str:
    with suppress(BrokerError):
        if violations(context.rules):
            return "the rules that other checks name forbid it: lift them (docs/cluster-rules.md)"
    if failure == "ProducerBusy":
        return (
            "close the producer with exclusive access to it, or raise its maxProducersPerTopic "
            "(docs/cluster-rules.md)"
        )
    return "the log of the broker has the reason; docs/cluster-rules.md has the rules to look for"
