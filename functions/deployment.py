"""Putting the Function on a functions worker: what it is to be, and doing it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulsar

from delaylevel import __version__
from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.errors import ConfigError, LevelTopicError, NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .archive import FILE_NAME, WorkerPython, build
from .consumer_loop import check_movable, source_topics
from .relay import DEFAULT_IN_FLIGHT
from .settings import DEFAULT_RECEIVER_QUEUE, FunctionSettings
from .worker import FunctionsWorker

CLASS_NAME = "delaylevel.functions.mover.LevelMover"
LOG_SUFFIX = "-function-log"
# The worker's own consumers only bring the first message.
_WORKERS_QUEUE = 10
_MB = 1024 * 1024
_LOG_POLL_MS = 1000


@dataclass(frozen=True)
class FunctionOptions:
    """How the Function of a level topic is to run.

    Attributes:
        name: the function's name; None for the level topic's.
        parallelism: how many instances.
        cpu: cores for each; used where the worker can limit them (Kubernetes).
        ram_mb: memory for each, likewise.
        receiver_queue: how many messages an instance fetches ahead, for each partition.
        in_flight: the most messages that an instance has sent and not confirmed.
        admin_url: the admin interface as workers reach it; None for the one used here.
        token_file: a file on the workers with the token of a role of the Function's own; None for
            the workers' credentials.
        tls_trust_certs_file: of the admin interface, a file on the workers; None for the one that
            the workers trust the cluster by.
        worker_python: of the workers; None where it is like the one here.
    """

    name: str | None = None
    parallelism: int = 1
    cpu: float = 1.0
    ram_mb: int = 512
    receiver_queue: int = DEFAULT_RECEIVER_QUEUE
    in_flight: int = DEFAULT_IN_FLIGHT
    admin_url: str | None = None
    token_file: str | None = None
    tls_trust_certs_file: str | None = None
    worker_python: WorkerPython | None = None

    def __post_init__(self) -> None:
        if self.parallelism < 1:
            raise ConfigError(f"parallelism is {self.parallelism}: at least one instance runs")
        if self.cpu <= 0 or self.ram_mb < 64:
            raise ConfigError("an instance needs a part of a CPU, and 64 MB")


@dataclass(frozen=True)
class Deployed:
    """What :func:`deploy` did.

    Attributes:
        function: ``tenant/namespace/name``.
        updated: it was there and was replaced; otherwise it is new.
        config: the function's configuration.
    """

    function: str
    updated: bool
    config: dict[str, Any]


def function_name(description: LevelTopicDescription, name: str | None = None) -> str:
    """Return ``tenant/namespace/name`` of a level topic's Function.

    Raises:
        ConfigError: the name cannot be one.
    """
    chosen = name or description.name.local
    if not chosen or "/" in chosen:
        raise ConfigError(f"{chosen!r} is no name for a function: it must not contain a slash")
    return f"{description.name.namespace_path}/{chosen}"


def log_topic(description: LevelTopicDescription) -> str:
    """Return the topic that the instances write their log to."""
    return description.name.with_suffix(LOG_SUFFIX).full


def function_config(
    description: LevelTopicDescription, connection: Connection, options: FunctionOptions
) -> dict[str, Any]:
    """Return the Function's configuration, as the worker's REST interface takes it.

    Args:
        description: the level topic.
        connection: the cluster, as it is reached from here.
        options: how it is to run.

    Raises:
        LevelTopicError: a Function may not move this level topic.
    """
    check_movable(description)
    tenant, namespace, name = function_name(description, options.name).split("/")
    settings = FunctionSettings(
        level_topic=description.topic,
        admin_url=options.admin_url or connection.admin_url,
        receiver_queue=options.receiver_queue,
        in_flight=options.in_flight,
        log_topic=log_topic(description),
        token_file=options.token_file,
        tls_trust_certs_file=options.tls_trust_certs_file,
        tls_allow_insecure=connection.tls_allow_insecure,
    )
    return {
        "tenant": tenant,
        "namespace": namespace,
        "name": name,
        "className": CLASS_NAME,
        "runtime": "PYTHON",
        "py": FILE_NAME,
        "inputSpecs": {
            topic: {"receiverQueueSize": _WORKERS_QUEUE} for topic in source_topics(description)
        },
        "subName": SUBSCRIPTION,
        "subscriptionPosition": "Earliest",
        # Without these a failed send loses its message, and `delete` what is parked.
        "processingGuarantees": "MANUAL",
        "autoAck": False,
        "cleanupSubscription": False,
        "parallelism": options.parallelism,
        "resources": {"cpu": options.cpu, "ram": options.ram_mb * _MB},
        "userConfig": {**settings.to_config(), "version": __version__},
    }


def deploy(
    connection: Connection, description: LevelTopicDescription, options: FunctionOptions
) -> Deployed:
    """Register the Function of a level topic, or replace the one that is there.

    Args:
        connection: the cluster.
        description: the level topic.
        options: how it is to run.

    Raises:
        LevelTopicError: it may not be moved by a Function, or there is no functions worker.
        ConfigError: the archive cannot be built here.
        AdminError: the worker refuses it.
    """
    config = function_config(description, connection, options)
    function = function_name(description, options.name)
    with FunctionsWorker(connection) as worker:
        existing = worker.config(function)
        _check_ours(function, existing, description)
        package = build(options.worker_python)
        if existing is None:
            worker.create(config, FILE_NAME, package)
        else:
            worker.update(config, FILE_NAME, package)
    return Deployed(function, existing is not None, config)


def restart(connection: Connection, function: str) -> None:
    """Start all instances anew.

    Args:
        connection: the cluster.
        function: ``tenant/namespace/name``.

    Raises:
        LevelTopicError: it is not deployed.
    """
    with FunctionsWorker(connection) as worker:
        try:
            worker.restart(function)
        except NotFoundError as error:
            raise not_deployed(function) from error


def delete(connection: Connection, description: LevelTopicDescription, function: str) -> None:
    """Remove the Function; every message stays, and its place in every partition.

    Args:
        connection: the cluster.
        description: the level topic.
        function: ``tenant/namespace/name``.

    Raises:
        LevelTopicError: it is not deployed, or was registered so that its removal would delete
            the subscriptions, and with them what is parked.
    """
    with FunctionsWorker(connection) as worker:
        existing = worker.config(function)
        if existing is None:
            raise not_deployed(function)
        _check_ours(function, existing, description)
        if existing.get("cleanupSubscription", True):
            raise LevelTopicError(
                f"function {function} is registered with cleanupSubscription=true: removing it "
                "would delete what is parked. Run `delaylevel function deploy` first, which sets "
                "it to false, and delete it then"
            )
        worker.delete(function)


def write_package(
    folder: Path,
    description: LevelTopicDescription,
    connection: Connection,
    options: FunctionOptions,
) -> str:
    """Write archive and configuration for people who deploy with their own tools.

    Args:
        folder: where to; it is made.
        description: the level topic.
        connection: the cluster, as it is reached from here.
        options: how it is to run.

    Returns:
        The ``pulsar-admin`` line that registers them. A name or option of a token is not in it.
    """
    config = function_config(description, connection, options)
    del config["py"]  # it is on the command line, and pulsar-admin wants it in one place
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / FILE_NAME
    archive.write_bytes(build(options.worker_python))
    settings = folder / f"{config['name']}.json"
    settings.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return shlex.join(
        [
            "pulsar-admin",
            "--admin-url",
            connection.admin_url,
            "functions",
            "create",
            "--py",
            str(archive.absolute()),
            "--function-config-file",
            str(settings.absolute()),
        ]
    )


def not_deployed(function: str) -> LevelTopicError:
    """Return the error for a function that is not registered."""
    return LevelTopicError(
        f"function {function} is not deployed: `delaylevel function deploy` does it"
    )


def _check_ours(
    function: str, existing: dict[str, Any] | None, description: LevelTopicDescription
) -> None:
    if existing is None:
        return
    topic = (existing.get("userConfig") or {}).get("level_topic")
    if existing.get("className") != CLASS_NAME or topic != description.topic:
        what = f"moves {topic}" if topic else f"is {existing.get('className')}"
        raise LevelTopicError(
            f"function {function} exists and {what}: name another one with --name"
        )


def log_lines(client: Any, admin: Admin, topic: str, *, follow: bool = False) -> Iterator[str]:
    """Yield what is kept of the instances' log lines, oldest first.

    Args:
        client: a ``pulsar.Client``.
        admin: of the same cluster.
        topic: from :func:`log_topic`.
        follow: go on without an end, with what is logged from now on.
    """
    if not follow and not admin.topic_exists(TopicName.parse(topic)):
        return
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    try:
        while follow or reader.has_message_available():
            try:
                yield reader.read_next(_LOG_POLL_MS).data().decode("utf-8", "replace")
            except pulsar.Timeout:
                continue
    finally:
        reader.close()
