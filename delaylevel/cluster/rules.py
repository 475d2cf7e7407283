"""Rules of brokers, namespaces and topics that can stop our clients or remove parked messages.

``RULES`` is the one table of them: creation refuses what it finds, ``doctor`` checks it, errors of
running services name it, and docs/production.md shows it. Only `read` asks the cluster.

A limit of a topic overrides that of its namespace, and this the broker's. Creation sets the
policies of `OURS` on every topic of ours, also where nothing restricts them now: a limit that the
namespace gets later then changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from delaylevel.errors import (
    AdminError,
    AlreadyRunningError,
    BrokerError,
    BrokerUnreachableError,
    NotFoundError,
    UpgradeRequiredError,
)
from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Member,
    Mover,
    Role,
)
from delaylevel.model.topic_name import TopicName

from .failures import may_pass
from .port import (
    SUBSCRIPTION_TYPES,
    BacklogQuota,
    BrokerSettings,
    NamespacePolicies,
    TopicAdmin,
    TopicPolicies,
)

T = TypeVar("T")

EVICTS = "consumer_backlog_eviction"
# Time for which rules that were read are not read again, in s.
_READ_S = 10.0
# Failures to open a producer that may come from a rule. A broker that wants encryption causes a
# timeout.
_BY_RULES = ("NotAllowedError", "ProducerBusy", "Timeout")
# Rules that one error names.
_MOST_NAMED = 2
# Errors that say all there is to say.
_CLEAR = (AlreadyRunningError, BrokerUnreachableError, UpgradeRequiredError)
_TENANT = "an administrator of the tenant: `pulsar-admin namespaces"
_CAUGHT_UP = "delete_when_subscriptions_caught_up"

#: The policies of every topic of ours. They lift each rule that a policy of a topic can lift.
OURS = TopicPolicies(
    message_ttl_s=0,
    delete_while_inactive=False,
    subscription_types=SUBSCRIPTION_TYPES,
    max_producers=0,
    max_consumers=0,
    max_consumers_per_subscription=0,
    max_subscriptions=0,
)


@dataclass(frozen=True)
class Need:
    """Least number of clients that a partition of ours has at the same time.

    Attributes:
        subscriptions: subscriptions, with one for each reader.
    """

    producers: int
    consumers: int
    subscriptions: int


#: What a partition of each kind needs, with one process of each kind. More processes need more.
NEEDS: Mapping[Role, Need] = {
    Role.LEVEL: Need(2, 2, 2),
    Role.HELD: Need(2, 2, 2),
    Role.DEAD_LETTER: Need(2, 2, 2),
    Role.WINDOW: Need(2, 2, 2),
    Role.JOURNAL: Need(1, 3, 3),
    Role.OUTCOMES: Need(2, 1, 2),
}
#: Producers of a target: the application's and ours.
TARGET_PRODUCERS = 2


@dataclass(frozen=True)
class Violation:
    """A rule in force that does not allow what is needed.

    Attributes:
        remedy: the remedy, with the person who can apply it.
    """

    says: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.says}: {self.remedy}"


@dataclass(frozen=True)
class Facts:
    """The rules in force for one level topic.

    Attributes:
        topics: own policies of its member topics; a missing one has none.
        targets: policies of the namespace and of the topic itself, for each target that exists and
            whose policies may be read.
    """

    description: LevelTopicDescription
    namespace: NamespacePolicies
    broker: BrokerSettings
    topics: Mapping[TopicName, TopicPolicies] = field(default_factory=dict)
    targets: Mapping[TopicName, tuple[NamespacePolicies, TopicPolicies]] = field(
        default_factory=dict
    )

    @property
    def path(self) -> str:
        """The namespace as ``tenant/namespace``."""
        return self.description.name.namespace_path

    @property
    def liftable(self) -> bool:
        """True unless the broker has no policies for single topics."""
        return self.broker.topic_policies is not False

    def members(self) -> Iterator[tuple[Member, TopicPolicies]]:
        """Yield each member topic with its own policies."""
        for member in self.description.members():
            yield member, self.topics.get(member.topic, TopicPolicies())


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        policy: the policy of a namespace that sets it, in the words of ``pulsar-admin namespaces``.
        ours: what our own topics need.
        targets: what a target needs; empty for nothing.
        lifted: True if creation lifts it for our own topics with a policy of the topic.
    """

    name: str
    policy: str
    setting: str
    ours: str
    targets: str
    lifted: bool
    find: Callable[[Facts], Iterator[Violation]]


def violations(facts: Facts, rules: Iterable[Rule] | None = None) -> list[Violation]:
    """Return what does not obey the rules; all of them by default."""
    return [each for rule in (RULES if rules is None else rules) for each in rule.find(facts)]


def own_policies(policies: NamespacePolicies, settings: BrokerSettings) -> TopicPolicies:
    """Return the policies that creation sets on a topic of ours in a namespace."""
    if len(policies.replication_clusters) < 2 or settings.cluster is None:
        return OURS
    local = frozenset({settings.cluster})
    return replace(OURS, replication_clusters=local)


def at_creation(
    description: LevelTopicDescription,
    policies: NamespacePolicies,
    settings: BrokerSettings,
    targets: Mapping[TopicName, tuple[NamespacePolicies, TopicPolicies]] | None = None,
) -> Facts:
    """Return the rules in force once the level topic is created."""
    own: dict[TopicName, TopicPolicies] = {}
    if settings.topic_policies is not False:
        wanted = own_policies(policies, settings)
        own = {member.topic: wanted for member in description.members()}
    return Facts(description, policies, settings, own, targets or {})


def read(admin: TopicAdmin, description: LevelTopicDescription) -> Facts:
    """Read the rules in force for an existing level topic."""
    settings = admin.broker_settings()
    policies = admin.namespace_policies(description.name.namespace_path)
    own: dict[TopicName, TopicPolicies] = {}
    if settings.topic_policies is not False:
        for member in description.members():
            try:
                own[member.topic] = admin.topic_policies(member.topic)
            except NotFoundError:
                continue
            except AdminError as error:
                if error.status != 405:
                    raise
                settings = replace(settings, topic_policies=False)
                break
    targets = read_targets(admin, description, settings, own=True)
    return Facts(description, policies, settings, own, targets)


def read_targets(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    settings: BrokerSettings,
    *,
    own: bool,
) -> dict[TopicName, tuple[NamespacePolicies, TopicPolicies]]:
    """Read the policies of the targets; those that may not be read are left out.

    Args:
        own: True to read policies of topics also where namespace and broker restrict nothing.
    """
    found: dict[TopicName, tuple[NamespacePolicies, TopicPolicies]] = {}
    namespaces: dict[str, NamespacePolicies | None] = {}
    for name in map(TopicName.parse, description.targets):
        path = name.namespace_path
        if path not in namespaces:
            try:
                namespaces[path] = admin.namespace_policies(path)
            except BrokerError:
                namespaces[path] = None
        policies = namespaces[path]
        if policies is None:
            continue
        found[name] = policies, TopicPolicies()
        limits = (policies.max_producers, settings.max_producers, policies.subscription_types)
        if own or any(limits):
            with suppress(BrokerError):
                found[name] = policies, admin.topic_policies(name)
    return found


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
        limit, place = _in_force(
            own, namespace, settings.max_producers, path, "maxProducersPerTopic"
        )
    except BrokerError:
        return ""
    if limit is None or limit <= 0:
        return ""
    return f"ProducerBusy: at most {limit} producers at a time ({place})"


class Explainer:
    """Texts of errors, with the rules of the cluster that stand in the way of a level topic.

    Several threads may use it.
    """

    def __init__(self, admin: TopicAdmin, now_s: Callable[[], float] = time.monotonic) -> None:
        self._admin = admin
        self._now_s = now_s
        self._found: dict[str, tuple[float, str | None]] = {}  # by level topic

    def explain(self, description: LevelTopicDescription, error: Exception) -> str:
        """Return the text of an error, and the rules in the way; nobody has to be reachable."""
        text = str(error) or type(error).__name__
        if not isinstance(error, BrokerError) or isinstance(error, _CLEAR):
            return text
        found = self.rules(description)
        if found:
            return f"{text}. The cluster does not allow what this needs: {found}"
        if found is None and not may_pass(error):
            return (
                f"{text}. This role may not read the rules of the cluster: an administrator can "
                f"run `delaylevel doctor {shell(description.topic)}`"
            )
        return text

    def rules(self, description: LevelTopicDescription) -> str | None:
        """Return the rules in the way of a level topic, each with its remedy; empty for none.

        None if they cannot be read.
        """
        until_s, found = self._found.get(description.topic, (0.0, None))
        if self._now_s() >= until_s:
            found = None
            with suppress(BrokerError):
                known = violations(read(self._admin, description))
                found = "; ".join(map(str, known[:_MOST_NAMED]))
            self._found[description.topic] = self._now_s() + _READ_S, found
        return found


def notes(
    description: LevelTopicDescription, policies: NamespacePolicies, settings: BrokerSettings
) -> tuple[str, ...]:
    """Return notes on rules that lose nothing, but matter when many messages are parked."""
    found = [
        f"a partition that holds {quota.limit_bytes:,} bytes accepts no more messages (backlog "
        f"quota of {description.name.namespace_path}, {quota.policy}): sending fails then, nothing "
        "is lost; if that is too little, use `pulsar-admin namespaces set-backlog-quota`"
        for quota in quotas(policies, settings)
        if quota.limit_bytes is not None and quota.policy != EVICTS
    ]
    if settings == BrokerSettings() and policies.subscription_expiration_min is None:
        found.append(
            "the broker's own defaults cannot be read with this token: let an administrator check "
            "that subscriptionExpirationTimeMinutes is 0, that encryptionRequireOnProducer is "
            f"false, and that backlogQuotaDefaultRetentionPolicy is not {EVICTS}"
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


def _lifting(facts: Facts, command: str) -> str:
    """Return the remedy for a rule that a policy of the topic lifts.

    Args:
        command: the subcommand of ``pulsar-admin namespaces`` that lifts it for the namespace.
    """
    if facts.liftable:
        return (
            f"an administrator of the tenant: `delaylevel levels create` for "
            f"{facts.description.topic} again, which lifts it with policies of its topics"
        )
    return (
        f"{_TENANT} {command}`, or a superuser: topicLevelPoliciesEnabled=true in broker.conf, as "
        "this broker has no policies for single topics"
    )


def _types(facts: Facts) -> Iterator[Violation]:
    setting = "subscriptionTypesEnabled"
    broker = facts.broker.subscription_types
    for member, own in facts.members():
        needed = {"Exclusive"}
        if facts.description.mover is Mover.FUNCTION and member.role in (Role.LEVEL, Role.HELD):
            needed.add("Shared")
        namespace = facts.namespace.subscription_types
        allowed, place = _in_force(own.subscription_types, namespace, broker, facts.path, setting)
        missing = needed - allowed if allowed else ()
        if missing:
            types = ",".join(sorted(SUBSCRIPTION_TYPES))
            yield Violation(
                f"{member.topic} allows only the subscription types "
                f"{', '.join(sorted(allowed or ()))} ({place}), and needs "
                f"{' and '.join(sorted(missing))}",
                _lifting(facts, f"set-subscription-types-enabled {facts.path} --types {types}"),
            )
    if facts.description.final_window is not FinalWindow.BROKER:
        return
    for target, (policies, own) in facts.targets.items():
        namespace, path = policies.subscription_types, target.namespace_path
        allowed, place = _in_force(own.subscription_types, namespace, broker, path, setting)
        if allowed and not allowed & {"Shared", "Key_Shared"}:
            yield Violation(
                f"{target} allows only the subscription types {', '.join(sorted(allowed))} "
                f"({place}), which get messages early with the final window broker",
                "use --final-window tracker, or allow Shared or Key_Shared",
            )


def _limit(
    name: str,
    policy: str,
    option: str,
    setting: str,
    attribute: str,
    *,
    words: str,
    need: str,
    ours: str,
    targets: str = "",
) -> Rule:
    """Return the rule for a limit of the clients of a topic.

    Args:
        option: the option with which ``pulsar-admin namespaces`` sets the policy.
        need: the attribute of `Need`; empty for 1.
    """

    def find(facts: Facts) -> Iterator[Violation]:
        broker = getattr(facts.broker, attribute)
        for member, own in facts.members():
            needed = getattr(NEEDS[member.role], need) if need else 1
            namespace = getattr(facts.namespace, attribute)
            limit, place = _in_force(
                getattr(own, attribute), namespace, broker, facts.path, setting
            )
            if limit is not None and 0 < limit < needed:  # 0 or less is no limit
                yield Violation(
                    f"{member.topic} allows {limit} of its {words} ({place}), and needs at least "
                    f"{needed}",
                    _lifting(facts, f"{policy} {facts.path} {option} 0"),
                )
        if need != "producers":
            return
        for target, (policies, own) in facts.targets.items():
            path = target.namespace_path
            limit, place = _in_force(
                own.max_producers, policies.max_producers, broker, path, setting
            )
            if limit is not None and 0 < limit < TARGET_PRODUCERS:
                yield Violation(
                    f"target {target} allows {limit} of its {words} ({place}), and needs at least "
                    f"{TARGET_PRODUCERS}, the application's and ours",
                    "an administrator of the tenant: `pulsar-admin topicPolicies "
                    f"set-max-producers {target} -p 0`",
                )

    return Rule(name, policy, setting, ours, targets, True, find)


def _encryption(facts: Facts) -> Iterator[Violation]:
    if facts.broker.encryption_required:
        yield Violation(
            "the broker refuses producers that do not encrypt (encryptionRequireOnProducer=true in "
            "broker.conf), and ours do not",
            "a superuser: encryptionRequireOnProducer=false in broker.conf, and the policy of "
            "those namespaces instead that need it",
        )
    namespaces = {facts.path: facts.namespace}
    namespaces.update({name.namespace_path: found for name, (found, _) in facts.targets.items()})
    for path, policies in namespaces.items():
        if policies.encryption_required:
            yield Violation(
                f"namespace {path} refuses producers that do not encrypt (policy encryption "
                "required), and ours do not",
                f"{_TENANT} set-encryption-required "
                f"{path} --disable`, or use topics of another namespace",
            )


def _prefix(facts: Facts) -> Iterator[Violation]:
    if facts.namespace.subscription_prefix and facts.broker.authorization is not False:
        yield Violation(
            f"namespace {facts.path} lets a role use only subscriptions that begin with its name "
            f"(subscription authorization mode Prefix), and ours are called {SUBSCRIPTION!r}",
            f"{_TENANT} set-subscription-auth-mode {facts.path} --subscription-auth-mode None`",
        )


def _ttl(facts: Facts) -> Iterator[Violation]:
    namespace, broker = facts.namespace.message_ttl_s, facts.broker.message_ttl_s
    for member, own in facts.members():
        setting = "ttlDurationDefaultInSeconds"
        ttl_s, place = _in_force(own.message_ttl_s, namespace, broker, facts.path, setting)
        if ttl_s:
            yield Violation(
                f"messages in {member.topic} expire after {format_duration(ttl_s * 1000)} (message "
                f"TTL, {place})",
                _lifting(facts, f"set-message-ttl {facts.path} --messageTTL 0"),
            )


def _inactivity(facts: Facts) -> Iterator[Violation]:
    if not facts.liftable:
        if facts.broker.delete_inactive_topics == _CAUGHT_UP:
            yield Violation(
                "the broker deletes inactive topics although they have subscriptions "
                "(brokerDeleteInactiveTopicsMode in broker.conf), and has no policies for single "
                "topics",
                f"{_TENANT} "
                f"set-inactive-topic-policies {facts.path} --disable-delete-while-inactive`, or a "
                "superuser: topicLevelPoliciesEnabled=true in broker.conf",
            )
        return
    for member, own in facts.topics.items():
        if own.delete_while_inactive is not False:
            yield Violation(
                f"the broker may delete {member} while no client is connected",
                f"run `delaylevel levels create` again for {facts.description.topic}, which sets "
                "deleteWhileInactive=false",
            )


def _replication(facts: Facts) -> Iterator[Violation]:
    clusters = facts.namespace.replication_clusters
    if facts.liftable and facts.broker.cluster in clusters:
        for topic, own in facts.topics.items():
            found = own.replication_clusters or clusters
            if len(found) > 1:
                yield Violation(
                    f"{topic} is replicated to {', '.join(sorted(found))}: a mover in each would "
                    "deliver everything",
                    f"run `delaylevel levels create` again for {facts.description.topic}, or use a "
                    "namespace that is not replicated",
                )
        return
    replicated = [own.replication_clusters or clusters for own in facts.topics.values()]
    if len(clusters) < 2 or (replicated and all(len(found) < 2 for found in replicated)):
        return
    reason = (
        "which of them is this one cannot be read with this token"
        if facts.liftable
        else "this broker has no policies for single topics"
    )
    yield Violation(
        f"{facts.path} is replicated to {', '.join(sorted(clusters))}, and {reason}: a mover "
        "in each would deliver everything",
        "use a namespace that is not replicated",
    )


def _expiration(facts: Facts) -> Iterator[Violation]:
    own = facts.namespace.subscription_expiration_min
    minutes = facts.broker.subscription_expiration_min if own is None else own
    if minutes:
        yield Violation(
            f"subscriptions in {facts.path} that are not used for "
            f"{format_duration(minutes * 60_000)} are deleted with the messages that they keep "
            "(subscription expiration)",
            f"{_TENANT} set-subscription-expiration-time {facts.path} --time 0`",
        )


def _quota(facts: Facts) -> Iterator[Violation]:
    longest_ms = facts.description.levels.maximum_ms
    for quota in quotas(facts.namespace, facts.broker):
        by_size = quota.limit_bytes is not None
        limit = (
            f"{quota.limit_bytes:,} bytes"
            if by_size
            else format_duration((quota.limit_s or 0) * 1000)
        )
        if quota.policy == EVICTS:
            says = (
                f"the backlog quota of {facts.path} throws unacknowledged messages away beyond "
                f"{limit} ({quota.type}, {quota.policy})"
            )
        elif not by_size and (quota.limit_s or 0) * 1000 <= longest_ms:
            says = (
                f"the backlog quota of {facts.path} blocks producers once a message is {limit} old "
                f"({quota.type}, {quota.policy}), and parked ones grow up to "
                f"{format_duration(longest_ms)} old"
            )
        else:
            continue
        yield Violation(
            says,
            f"{_TENANT} set-backlog-quota "
            f"{facts.path} --type {quota.type} {'--limit -1' if by_size else '--limitTime -1'} "
            "--policy producer_exception`",
        )


RULES: tuple[Rule, ...] = (
    Rule(
        "subscription types",
        "set-subscription-types-enabled",
        "subscriptionTypesEnabled",
        "Exclusive, for locks and readers; a Function also Shared",
        "with the final window broker: Shared or Key_Shared",
        True,
        _types,
    ),
    _limit(
        "number of producers",
        "set-max-producers-per-topic",
        "-p",
        "maxProducersPerTopic",
        "max_producers",
        words="producers",
        need="producers",
        ours="one for each process that sends, each mover and each dispatcher",
        targets="2 or more: the application's and ours",
    ),
    _limit(
        "number of consumers",
        "set-max-consumers-per-topic",
        "-c",
        "maxConsumersPerTopic",
        "max_consumers",
        words="consumers",
        need="consumers",
        ours="a lock, and a reader for each mover, dispatcher and query",
    ),
    _limit(
        "consumers of a subscription",
        "set-max-consumers-per-subscription",
        "-c",
        "maxConsumersPerSubscription",
        "max_consumers_per_subscription",
        words="consumers of a subscription",
        need="",
        ours="one for each instance of a Function; otherwise 1",
    ),
    _limit(
        "number of subscriptions",
        "set-max-subscriptions-per-topic",
        "-m",
        "maxSubscriptionsPerTopic",
        "max_subscriptions",
        words="subscriptions",
        need="subscriptions",
        ours="one, and one for each reader",
    ),
    Rule(
        "encryption",
        "set-encryption-required",
        "encryptionRequireOnProducer",
        "not required: producers of ours do not encrypt",
        "not required",
        False,
        _encryption,
    ),
    Rule(
        "subscription prefix",
        "set-subscription-auth-mode",
        "",
        "mode None, because all roles share the subscription delaylevel",
        "",
        False,
        _prefix,
    ),
    Rule(
        "message ttl",
        "set-message-ttl",
        "ttlDurationDefaultInSeconds",
        "no expiry",
        "",
        True,
        _ttl,
    ),
    Rule(
        "inactive deletion",
        "set-inactive-topic-policies",
        "brokerDeleteInactiveTopicsEnabled",
        "never deleted",
        "a subscription, or `delaylevel levels set --keep-target`",
        True,
        _inactivity,
    ),
    Rule(
        "replication",
        "set-clusters",
        "",
        "one cluster only, because a mover in each would deliver everything",
        "",
        True,
        _replication,
    ),
    Rule(
        "subscription expiration",
        "set-subscription-expiration-time",
        "subscriptionExpirationTimeMinutes",
        "0: an idle subscription keeps parked messages",
        "",
        False,
        _expiration,
    ),
    Rule(
        "backlog quota",
        "set-backlog-quota",
        "backlogQuotaDefaultRetentionPolicy",
        "no eviction, and no limit of age below the longest delay",
        "",
        False,
        _quota,
    ),
)
