"""Conversion of the admin REST interface's answers into the port's values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timezone
from typing import Any

from delaylevel.cluster.port import (
    AcknowledgedRange,
    BacklogQuota,
    BrokerSettings,
    ConsumerStats,
    DelayedDelivery,
    LedgerInfo,
    NamespacePolicies,
    PartitionStats,
    PublisherStats,
    SchemaVersion,
    SubscriptionStats,
)
from delaylevel.model.clock import instant_ms
from delaylevel.model.formatting import parse_iso
from delaylevel.model.position import Position


def broker_settings(value: Mapping[str, str]) -> BrokerSettings:
    """Read the runtime configuration; all its values are strings."""
    policies = (_flag(value, "topicLevelPoliciesEnabled"), _flag(value, "systemTopicEnabled"))
    return BrokerSettings(
        cluster=value.get("clusterName") or None,
        topic_policies=None if None in policies else all(policies),
        max_partitions=_number(value, "maxNumPartitionsPerPartitionedTopic"),
        subscription_expiration_min=_number(value, "subscriptionExpirationTimeMinutes"),
        backlog_quotas=_default_quotas(value),
        encryption_required=_flag(value, "encryptionRequireOnProducer"),
        authorization=_flag(value, "authorizationEnabled"),
        subscription_types=frozenset(_words(value.get("subscriptionTypesEnabled", ""))) or None,
        max_producers=_number(value, "maxProducersPerTopic"),
    )


def namespace_policies(value: Mapping[str, Any]) -> NamespacePolicies:
    """Read the policies of a namespace; omit quotas that limit nothing."""
    quotas = []
    for kind, quota in (value.get("backlog_quota_map") or {}).items():
        size, age = quota.get("limitSize", -1), quota.get("limitTime", -1)
        by_size = kind == "destination_storage"
        if size >= 0 if by_size else age > 0:
            quotas.append(
                BacklogQuota(
                    type=kind,
                    limit_bytes=size if by_size else None,
                    limit_s=None if by_size else age,
                    policy=str(quota.get("policy", "")),
                )
            )
    return NamespacePolicies(
        subscription_expiration_min=value.get("subscription_expiration_time_minutes"),
        backlog_quotas=tuple(sorted(quotas, key=lambda quota: quota.type)),
        replication_clusters=frozenset(value.get("replication_clusters") or ()),
        encryption_required=bool(value.get("encryption_required")),
        subscription_prefix=value.get("subscription_auth_mode") == "Prefix",
        subscription_types=frozenset(value.get("subscription_types_enabled") or ()) or None,
        max_producers=value.get("max_producers_per_topic"),
    )


def delayed_delivery(value: Mapping[str, Any]) -> DelayedDelivery:
    """Read a delayed-delivery policy; brokers omit fields that they do not know."""
    return DelayedDelivery(
        active=bool(value["active"]),
        tick_ms=int(value["tickTime"]),
        max_delay_ms=int(value.get("maxDeliveryDelayInMillis") or 0),
        fixed_delay_ms=int(value.get("fixedDeliveryDelayInMillis") or 0),
    )


def retains(value: Mapping[str, Any]) -> bool:
    """Return True if a retention policy, or the broker's configuration, keeps what is consumed."""
    time = value.get("retentionTimeInMinutes", value.get("defaultRetentionTimeInMinutes", 0))
    size = value.get("retentionSizeInMB", value.get("defaultRetentionSizeInMB", 0))
    return int(time) != 0 and int(size) != 0


def schema_versions(value: Mapping[str, Any]) -> list[SchemaVersion]:
    """Read every version of a topic's schema, oldest first."""
    versions = [
        SchemaVersion(
            type=item["type"],
            definition=item.get("data") or "",
            version=int(item["version"]),
            properties=item.get("properties") or {},
        )
        for item in value["getSchemaResponses"]
    ]
    return sorted(versions, key=lambda schema: schema.version)


def ledgers(value: Mapping[str, Any]) -> list[LedgerInfo]:
    """Read the ledgers of a partition's internal statistics."""
    found = [
        LedgerInfo(item["ledgerId"], item["entries"], size=item.get("size", 0))
        for item in value["ledgers"]
    ]
    if found:
        # The open ledger has 0 entries and bytes in the list.
        last = found[-1]
        entries = max(last.entries, value.get("currentLedgerEntries", 0))
        opened = value.get("lastLedgerCreatedTimestamp")
        size = max(last.size, value.get("currentLedgerSize", 0))
        found[-1] = LedgerInfo(last.ledger, entries, instant(opened) if opened else None, size)
    return found


# (7:1..7:3] is entries 2 and 3 of ledger 7.
_RANGE = re.compile(r"\((-?\d+):(-?\d+)\.\.(-?\d+):(-?\d+)\]")


def acknowledged_ranges(text: str) -> tuple[AcknowledgedRange, ...]:
    """Read ``individuallyDeletedMessages`` of a cursor: ``[(7:1..7:3],(7:6..7:7]]``."""
    return tuple(
        AcknowledgedRange(int(ledger), int(before) + 1 if ledger == first else 0, int(last))
        for first, before, ledger, last in _RANGE.findall(text)
    )


def position(value: Mapping[str, int]) -> Position:
    """Read a message ID."""
    return Position(value["ledgerId"], value["entryId"], value.get("batchIndex", -1))


def text_position(text: str) -> Position:
    """Read a position as ``ledger:entry``."""
    ledger, _, entry = text.partition(":")
    return Position(int(ledger), int(entry))


def instant(text: str) -> int:
    """Read an ISO-8601 instant into milliseconds since the epoch."""
    moment = parse_iso(text)
    return instant_ms(moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment)


# Other states are transitions.
_DEDUPLICATION = {"Enabled": True, "Disabled": False}


def partition_stats(value: Mapping[str, Any]) -> PartitionStats:
    """Read the statistics of one partition."""
    subscriptions = {}
    for name, item in value["subscriptions"].items():
        oldest = item.get("earliestMsgPublishTimeInBacklog", -1)
        backlog = item["msgBacklog"]
        subscriptions[name] = SubscriptionStats(
            backlog_entries=backlog,
            oldest_publish_ms=oldest if oldest > 0 and backlog > 0 else None,
            type=item.get("type") or "None",
            durable=item.get("isDurable", True),
            consumers=tuple(
                ConsumerStats(
                    name=consumer.get("consumerName") or "",
                    address=(consumer.get("address") or "").removeprefix("/"),
                    connected_since=consumer.get("connectedSince") or "",
                    properties=dict(consumer.get("metadata") or {}),
                )
                for consumer in item.get("consumers") or ()
            ),
            delayed_entries=item.get("msgDelayed", 0),
            messages_out=item.get("msgOutCounter", 0),
            acknowledged_ms=item.get("lastMarkDeleteAdvancedTimestamp") or None,
        )
    return PartitionStats(
        storage_bytes=value["storageSize"],
        subscriptions=subscriptions,
        deduplication=_DEDUPLICATION.get(value.get("deduplicationStatus") or ""),
        messages_in=value.get("msgInCounter", 0),
        publishers=tuple(
            PublisherStats(
                name=item.get("producerName") or "",
                access_mode=item.get("accessMode") or "",
                properties=dict(item.get("metadata") or {}),
            )
            for item in value.get("publishers") or ()
        ),
        replicated=bool(value.get("replication")),
    )


def _default_quotas(value: Mapping[str, str]) -> tuple[BacklogQuota, ...]:
    if _flag(value, "backlogQuotaCheckEnabled") is False:
        return ()
    policy = value.get("backlogQuotaDefaultRetentionPolicy", "")
    size = _number(value, "backlogQuotaDefaultLimitBytes") or 0
    if size <= 0:
        size = int(float(value.get("backlogQuotaDefaultLimitGB") or 0) * (1 << 30))
    age = _number(value, "backlogQuotaDefaultLimitSecond") or 0
    quotas = []
    if size > 0:
        quotas.append(BacklogQuota("destination_storage", size, None, policy))
    if age > 0:
        quotas.append(BacklogQuota("message_age", None, age, policy))
    return tuple(quotas)


def _words(text: str) -> list[str]:
    """Read a list as the broker writes it: ``[Shared, Failover]``."""
    return re.findall(r"\w+", text)


def _flag(value: Mapping[str, str], name: str) -> bool | None:
    text = value.get(name)
    return None if text is None else text == "true"


def _number(value: Mapping[str, str], name: str) -> int | None:
    text = value.get(name)
    return int(text) if text and text.lstrip("-").isdigit() else None
