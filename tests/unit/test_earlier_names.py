"""Tests that public names keep their import paths, including those of earlier releases."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from delaylevel._moved import PATHS

#: Earlier path -> the names that applications import from it.
NAMES = {
    "delaylevel": """
        Deduplicator DelayLevelClient DelayLevelError DelayLevelProducer Levels PartitionBy
        PartitionStrategy TimeBucketTracker wrap
    """,
    "delaylevel.asyncio": """
        DelayLevelProducer DelayLevelClient
    """,
    "delaylevel.testing": """
        ManualClock MemoryAdmin MemoryClient MemoryPulsar TopicMessage
    """,
    "delaylevel.errors": """
        DelayLevelError InvalidInputError BrokerError InvalidDelayError DelayTooLongError
        InvalidStrategyError UnsupportedOptionError EnvelopeError MissingExtraError
        ConfigError StepsError BrokerUnreachableError AdminError NotFoundError ConflictError
        PermissionDeniedError LevelTopicError StillPendingError StrategyMismatchError
        UnsafeNamespaceError TargetNotAllowedError DataLossError AlreadyRunningError
        PrerequisiteError
    """,
    "delaylevel.config": """
        Connection
    """,
    "delaylevel.description": """
        Mover FinalWindow MissingTarget Role Member LevelTopicDescription
        default_level_topic
    """,
    "delaylevel.topics": """
        FoundLevelTopic check_same create describe find list_level_topics notes
    """,
    "delaylevel.lifecycle": """
        longer_levels expand set_on_missing_target PendingEntries pending_entries Orphan
        orphans delete
    """,
    "delaylevel.deadletters": """
        DeadLetter ReplayReport source_of dead_letters replay discard find
    """,
    "delaylevel.levelstatus": """
        PartitionStatus LevelTopicStatus status
    """,
    "delaylevel.spark_sync": """
        DelayLevelDataSource Executors SparkSyncJob SyncSettings default_checkpoint pending
    """,
    "delaylevel.functions.deployment": """
        FunctionOptions Deployed function_name log_topic function_config deploy restart
        delete write_package not_deployed log_lines
    """,
    "delaylevel.functions.health": """
        InstanceStatus FunctionStatus status instances_of problems_of
    """,
    "delaylevel.dispatcher": """
        DispatchSettings Dispatcher PartitionFigures
    """,
    "delaylevel.inspection": """
        Bucket DueWithin Horizon Inspector Part Selection Window
    """,
    "delaylevel.doctor": """
        ExamOptions Finding Problem State examine
    """,
    "delaylevel.plan": """
        Load Plan plan plans
    """,
    "delaylevel.metrics": """
        Collector serve CountingProducer ProducerCollector
    """,
    "delaylevel.admin": """
        Admin
    """,
    "delaylevel.broker": """
        BrokerStatus EmbeddedBroker distribution_directory fetch instances is_fetched
        running_instance PULSAR_VERSION
    """,
    "delaylevel.router": """
        Hop Decision Router
    """,
    "delaylevel.dedup": """
        Deduplicator
    """,
    "delaylevel.segments": """
        PendingSegments
    """,
    "delaylevel.timebucket": """
        TimeBucketTracker
    """,
    "delaylevel.client": """
        DelayLevelClient wrap
    """,
    "delaylevel.strategy": """
        PartitionStrategy Levels PartitionBy
    """,
    "delaylevel.clock": """
        Clock SystemClock
    """,
    "delaylevel.producer": """
        DelayLevelProducer
    """,
    "delaylevel.mover": """
        LocalMover
    """,
    "delaylevel.functions.mover": """
        LevelMover
    """,
    "delaylevel.spark_sync.cluster": """
        cluster_conf
    """,
    "delaylevel.spark_sync.steps": """
        load_steps
    """,
}


@pytest.mark.parametrize("path", NAMES)
def test_a_public_name_can_be_imported_from_its_earlier_path(path: str) -> None:
    module = importlib.import_module(path)
    missing = [name for name in NAMES[path].split() if not hasattr(module, name)]
    assert missing == []


def test_an_earlier_path_gives_the_same_objects() -> None:
    for path, current in PATHS.items():
        earlier, module = importlib.import_module(path), importlib.import_module(current)
        for name in NAMES[path].split():
            assert getattr(earlier, name) is getattr(module, name)


def test_an_import_statement_finds_an_earlier_path() -> None:
    program = "from delaylevel.dedup import Deduplicator; import delaylevel.router as r; r.Router"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_at_an_earlier_path_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        importlib.import_module("delaylevel.dedup").Nothing  # noqa: B018
