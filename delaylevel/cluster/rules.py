"""Rules of brokers, namespaces and topics that can stop our clients or remove parked messages.

``RULES`` is the one list of them: creation refuses what it finds, ``doctor`` checks it, and
docs/operations.md shows it. Only `read` asks the cluster.

A policy of a topic overrides that of its namespace, and this the broker's. So every topic of ours
has the policies of `OURS`: no limit of a namespace concerns it, now or later. That is why a broker
without policies for single topics is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from delaylevel.errors import (
    AdminError,
    AlreadyRunningError,
    BrokerError,
    BrokerUnreachableError,
    NotFoundError,
    UpgradeRequiredError,
)
from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .port import (
    BY_SIZE,
    SUBSCRIPTION_TYPES,
    BacklogQuota,
    BrokerSettings,
    NamespacePolicies,
    TopicAdmin,
    TopicPolicies,
)
from .threads import in_parallel

T = TypeVar("T")
# Of the namespace, and of the topic itself.
TargetPolicies = Mapping[TopicName, tuple[NamespacePolicies, TopicPolicies]]

EVICTS = "consumer_backlog_eviction"
# Failures to open a producer that may come from a rule. A broker that wants encryption causes a
# timeout.
_BY_RULES = ("NotAllowedError", "ProducerBusy", "Timeout")
# Errors that say all there is to say.
_CLEAR = (AlreadyRunningError, BrokerUnreachableError, UpgradeRequiredError)
_TENANT = "an administrator of the tenant: `pulsar-admin namespaces"
_MAX_PRODUCERS = "maxProducersPerTopic"

#: The policies of every topic of ours.
OURS = TopicPolicies(
    message_ttl_s=0,
    delete_while_inactive=False,
    subscription_types=SUBSCRIPTION_TYPES,
    max_producers=0,
    max_consumers=0,
    max_consumers_per_subscription=0,
    max_subscriptions=0,
)
#: Producers of a target: the application's and ours.
TARGET_PRODUCERS = 2
#: The answer of a broker without policies for single topics.
NO_TOPIC_POLICIES = 405


@dataclass(frozen=True)
class Problem:
    """A rule in force that does not allow what is needed, or another problem of a level topic."""

    says: str  # in one line
    remedy: str  # in one line; for a rule, with the person who can apply it

    def __str__(self) -> str:
        return f"{self.says}: {self.remedy}"


@dataclass(frozen=True)
class Facts:
    """The rules in force for one level topic."""

    description: LevelTopicDescription
    namespace: NamespacePolicies
    broker: BrokerSettings
    # Of its member topics, without those that do not exist, or are just to be created.
    topics: Mapping[TopicName, TopicPolicies] = field(default_factory=dict)
    targets: TargetPolicies = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The namespace as ``tenant/namespace``."""
        return self.description.name.namespace_path


def violations(facts: Facts) -> list[Problem]:
    """Return what does not obey the rules."""
    return [each for find in RULES.values() for each in find(facts)]


def own_policies(policies: NamespacePolicies, settings: BrokerSettings) -> TopicPolicies:
    """Return the policies that creation sets on a topic of ours in a namespace."""
    if len(policies.replication_clusters) < 2 or settings.cluster is None:
        return OURS
    # Movers in two clusters would both deliver everything.
    return replace(OURS, replication_clusters=frozenset({settings.cluster}))


def missing_policies(present: TopicPolicies, wanted: TopicPolicies) -> dict[str, Any]:
    """Return the policies that a topic has not as wanted, by their attributes."""
    current = vars(present)
    return {
        name: value
        for name, value in vars(wanted).items()
        if value is not None and current[name] != value
    }


def read(admin: TopicAdmin, description: LevelTopicDescription) -> Facts:
    """Read the rules in force for an existing level topic."""
    settings = admin.broker_settings()
    policies = admin.namespace_policies(description.name.namespace_path)
    own: dict[TopicName, TopicPolicies] = {}
    try:
        for member in description.members():
            with suppress(NotFoundError):
                own[member.topic] = admin.topic_policies(member.topic)
    except AdminError as error:
        if error.status != NO_TOPIC_POLICIES:
            raise
        settings = replace(settings, topic_policies=False)
    targets = read_targets(admin, description)
    return Facts(description, policies, settings, own, targets)


def read_targets(admin: TopicAdmin, description: LevelTopicDescription) -> TargetPolicies:
    """Read the policies of targets, without those that may not be read."""

    def of_namespace(path: str) -> NamespacePolicies | None:
        try:
            return admin.namespace_policies(path)
        except BrokerError:
            return None

    def of_topic(name: TopicName) -> TopicPolicies:
        try:
            return admin.topic_policies(name)
        except BrokerError:
            return TopicPolicies()

    names = list(map(TopicName.parse, description.targets))
    paths = {name.namespace_path for name in names}
    namespaces = dict(zip(paths, in_parallel(of_namespace, paths), strict=True))
    found = [(name, policies) for name in names if (policies := namespaces[name.namespace_path])]
    own = in_parallel(of_topic, [name for name, _ in found])
    return {name: (policies, of) for (name, policies), of in zip(found, own, strict=True)}


def refusal_of_target(admin: TopicAdmin, topic: TopicName, failure: str) -> str:
    """Return the rule for which a target refuses a producer of ours; empty if none is known."""
    if failure not in _BY_RULES:
        return ""
    path = topic.namespace_path
    try:
        policies, settings = admin.namespace_policies(path), admin.broker_settings()
        if policies.encryption_required:
            return f"producers have to encrypt (policy of namespace {path})"
        if settings.encryption_required:
            return "producers have to encrypt (encryptionRequireOnProducer in broker.conf)"
        if failure != "ProducerBusy":
            return ""
        own, namespace = admin.topic_policies(topic).max_producers, policies.max_producers
        limit, place = _in_force(own, namespace, settings.max_producers, path, _MAX_PRODUCERS)
    except BrokerError:
        return ""
    if limit is None or limit <= 0:
        return ""
    return f"ProducerBusy: at most {limit} producers at a time ({place})"


def advised(description: LevelTopicDescription, error: Exception) -> str:
    """Return the text of an error of a running service; a rule may have come since its start."""
    text = str(error) or type(error).__name__
    if not isinstance(error, BrokerError) or isinstance(error, _CLEAR):
        return text
    command = f"`delaylevel doctor {shell(description.topic)}`"
    return f"{text} ({command} tells whether the cluster forbids it, and the remedy)"


def notes(
    description: LevelTopicDescription, policies: NamespacePolicies, settings: BrokerSettings
) -> tuple[str, ...]:
    """Return notes on rules that lose nothing, but matter when many messages are parked."""
    found = [
        f"sending fails once a partition holds {quota.limit:,} bytes (backlog quota of "
        f"{description.name.namespace_path}); `pulsar-admin namespaces set-backlog-quota` raises it"
        for quota in quotas(policies, settings)
        if quota.type == BY_SIZE and quota.policy != EVICTS
    ]
    if settings == BrokerSettings() and policies.subscription_expiration_min is None:
        found.append(
            "this token cannot read broker.conf: let an administrator check there that "
            "subscriptionExpirationTimeMinutes=0, encryptionRequireOnProducer=false, and "
            f"backlogQuotaDefaultRetentionPolicy is not {EVICTS}"
        )
    return tuple(found)


def quotas(policies: NamespacePolicies, settings: BrokerSettings) -> tuple[BacklogQuota, ...]:
    """Return the quotas that apply: the namespace's own, and the broker's for the other types."""
    own = {quota.type for quota in policies.backlog_quotas}
    defaults = (quota for quota in settings.backlog_quotas if quota.type not in own)
    return (*policies.backlog_quotas, *defaults)


# --- the rules -------------------------------------------------------------------------------


def _in_force(
    own: T | None, namespace: T | None, broker: T | None, path: str, setting: str
) -> tuple[T | None, str]:
    """Return the value in force and its place, in words."""
    if own is not None:
        return own, "policy of the topic"
    if namespace is not None:
        return namespace, f"policy of namespace {path}"
    return broker, f"{setting} in broker.conf"


def _policies(facts: Facts) -> Iterator[Problem]:
    if facts.broker.topic_policies is False:
        yield Problem(
            "this broker has no policies for single topics, which keep parked messages and let our "
            "clients in, whatever its namespaces limit",
            "a superuser: topicLevelPoliciesEnabled=true and systemTopicEnabled=true in "
            "broker.conf, Pulsar's defaults",
        )
        return
    wanted = own_policies(facts.namespace, facts.broker)
    for topic, own in facts.topics.items():
        # An administrator may have removed them, or another tool.
        if missing := missing_policies(own, wanted):
            yield Problem(
                f"{topic} lacks policies of ours ({', '.join(missing)}), so that the broker may "
                "remove parked messages or refuse our clients",
                "an administrator of the tenant: "
                f"`{facts.description.creation_command()}`, which sets them",
            )


def _target_limits(facts: Facts) -> Iterator[Problem]:
    broker = facts.broker
    for target, (policies, own) in facts.targets.items():
        path = target.namespace_path
        limit, place = _in_force(
            own.max_producers, policies.max_producers, broker.max_producers, path, _MAX_PRODUCERS
        )
        if limit is not None and 0 < limit < TARGET_PRODUCERS:  # 0 or less is no limit
            yield Problem(
                f"target {target} allows {limit} of its producers ({place}), and needs at least "
                f"{TARGET_PRODUCERS}, the application's and ours",
                "an administrator of the tenant: `pulsar-admin topicPolicies set-max-producers "
                f"{target} -p 0`",
            )
        if facts.description.final_window is not FinalWindow.BROKER:
            continue
        types, place = _in_force(
            own.subscription_types,
            policies.subscription_types,
            broker.subscription_types,
            path,
            "subscriptionTypesEnabled",
        )
        if types and not types & {"Shared", "Key_Shared"}:
            yield Problem(
                f"target {target} allows only the subscription types {', '.join(sorted(types))} "
                f"({place}), which get messages early with the final window broker",
                "use --final-window tracker, or allow Shared or Key_Shared",
            )


def _encryption(facts: Facts) -> Iterator[Problem]:
    if facts.broker.encryption_required:
        yield Problem(
            "the broker refuses producers that do not encrypt (encryptionRequireOnProducer=true in "
            "broker.conf), and ours do not",
            "a superuser: encryptionRequireOnProducer=false in broker.conf, and the policy of "
            "those namespaces instead that need it",
        )
    namespaces = {facts.path: facts.namespace}
    namespaces.update({name.namespace_path: found for name, (found, _) in facts.targets.items()})
    for path, policies in namespaces.items():
        if policies.encryption_required:
            yield Problem(
                f"namespace {path} refuses producers that do not encrypt (policy encryption "
                "required), and ours do not",
                f"{_TENANT} set-encryption-required "
                f"{path} --disable`, or use topics of another namespace",
            )


def _prefix(facts: Facts) -> Iterator[Problem]:
    if facts.namespace.subscription_prefix and facts.broker.authorization is not False:
        yield Problem(
            f"namespace {facts.path} lets a role use only subscriptions that begin with its name "
            f"(subscription authorization mode Prefix), and ours are called {SUBSCRIPTION!r}",
            f"{_TENANT} set-subscription-auth-mode {facts.path} --subscription-auth-mode None`",
        )


def _replication(facts: Facts) -> Iterator[Problem]:
    clusters = facts.namespace.replication_clusters
    if len(clusters) < 2 or facts.broker.cluster in clusters:
        return  # or a policy of ours keeps each topic in this cluster
    if facts.topics and all(
        len(own.replication_clusters or clusters) < 2 for own in facts.topics.values()
    ):
        return
    yield Problem(
        f"{facts.path} is replicated to {', '.join(sorted(clusters))}, and which of them is this "
        "one cannot be read with this token: a mover in each would deliver everything",
        "use a namespace that is not replicated, or let a superuser create the level topic",
    )


def _expiration(facts: Facts) -> Iterator[Problem]:
    own = facts.namespace.subscription_expiration_min
    minutes = facts.broker.subscription_expiration_min if own is None else own
    if minutes:
        yield Problem(
            f"subscriptions in {facts.path} that are not used for "
            f"{format_duration(minutes * 60_000)} are deleted with the messages that they keep "
            "(subscription expiration)",
            f"{_TENANT} set-subscription-expiration-time {facts.path} --time 0`",
        )


def _quota(facts: Facts) -> Iterator[Problem]:
    longest_ms = facts.description.levels.maximum_ms
    for quota in quotas(facts.namespace, facts.broker):
        by_size, number = quota.type == BY_SIZE, quota.limit
        limit = f"{number:,} bytes" if by_size else format_duration(number * 1000)
        if quota.policy == EVICTS:
            says = (
                f"the backlog quota of {facts.path} throws unacknowledged messages away beyond "
                f"{limit} ({quota.type}, {quota.policy})"
            )
        elif not by_size and number * 1000 <= longest_ms:
            says = (
                f"the backlog quota of {facts.path} blocks producers once a message is {limit} old "
                f"({quota.type}, {quota.policy}), and parked ones grow up to "
                f"{format_duration(longest_ms)} old"
            )
        else:
            continue
        yield Problem(
            says,
            f"{_TENANT} set-backlog-quota "
            f"{facts.path} --type {quota.type} {'--limit -1' if by_size else '--limitTime -1'} "
            "--policy producer_exception`",
        )


#: The rules by their names on docs/operations.md and in ``doctor``.
RULES: dict[str, Callable[[Facts], Iterator[Problem]]] = {
    "topic policies": _policies,
    "target limits": _target_limits,
    "encryption": _encryption,
    "subscription prefix": _prefix,
    "replication": _replication,
    "subscription expiration": _expiration,
    "backlog quota": _quota,
}
