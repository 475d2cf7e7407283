"""Deployment of the Function on a functions worker."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from delaylevel import __version__
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import ConfigError, LevelTopicError
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover, Role

from .worker import FunctionsWorker

CLASS_NAME = "delaylevel.functions.mover.LevelMover"
# The worker's own consumers only deliver the first message.
_WORKERS_QUEUE = 10
_MB = 1024 * 1024


@dataclass(frozen=True)
class FunctionSettings:
    """The user configuration of one Function, for the admin interface and its own clients."""

    level_topic: str
    admin_url: str
    token_file: str | None = None
    tls_trust_certs_file: str | None = None
    tls_allow_insecure: bool = False
    tls_validate_hostname: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FunctionSettings:
        """Read a Function's user configuration."""
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in config.items() if name in known})
        except TypeError as error:
            raise ConfigError(
                f"the Function's user configuration cannot be read ({error}): deploy it with "
                "`delaylevel mover deploy`"
            ) from error


def source_topics(description: LevelTopicDescription) -> list[str]:
    """Return the topics that a Function reads: every level, and the held topic."""
    return [
        item.topic.full for item in description.members() if item.role in (Role.LEVEL, Role.HELD)
    ]


def check_movable(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError unless a Function may move this level topic."""
    if description.mover is not Mover.FUNCTION:
        raise LevelTopicError(
            f"level topic {description.topic} is described with mover "
            f"{description.mover.value!r}: its producers rely on that, and do not ask the broker "
            "to hold messages until their hand-off. Use `delaylevel run` for it, or create a level "
            "topic of another name with `delaylevel levels create --mover function "
            "--level-topic NAME`"
        )


@dataclass(frozen=True)
class FunctionOptions:
    """Options of a level topic's Function.

    Attributes:
        parallelism: number of instances.
        cpu: cores for each instance, if the worker can limit them (Kubernetes).
        ram_mb: memory for each instance in MB, if the worker can limit it.
        admin_url: address of the admin interface as workers reach it; None for the one used here.
        token_file: file on the workers with the token of the Function's own role; None for the
            workers' credentials.
        tls_trust_certs_file: file on the workers with certificates for the admin interface; None
            for those by which the workers trust the cluster.
    """

    parallelism: int = 1
    cpu: float = 1.0
    ram_mb: int = 512
    admin_url: str | None = None
    token_file: str | None = None
    tls_trust_certs_file: str | None = None

    def __post_init__(self) -> None:
        if self.parallelism < 1 or self.cpu <= 0 or self.ram_mb < 64:
            raise ConfigError("a Function has an instance or more, with a part of a CPU and 64 MB")


@dataclass(frozen=True)
class Deployed:
    """Result of :func:`deploy`.

    Attributes:
        function: ``tenant/namespace/name``.
        updated: True if an existing function was replaced.
        config: configuration of the function.
    """

    function: str
    updated: bool
    config: dict[str, Any]


def function_name(description: LevelTopicDescription) -> str:
    """Return ``tenant/namespace/name`` of a level topic's Function."""
    return f"{description.name.namespace_path}/{description.name.local}"


def function_config(
    description: LevelTopicDescription, connection: Connection, options: FunctionOptions
) -> dict[str, Any]:
    """Return the Function's configuration for the worker's REST interface.

    Raises:
        LevelTopicError: a Function may not move this level topic.
    """
    check_movable(description)
    tenant, namespace, name = function_name(description).split("/")
    settings = FunctionSettings(
        level_topic=description.topic,
        admin_url=options.admin_url or connection.admin_url,
        token_file=options.token_file,
        tls_trust_certs_file=options.tls_trust_certs_file,
        tls_allow_insecure=connection.tls_allow_insecure,
        tls_validate_hostname=connection.tls_validate_hostname,
    )
    return {
        "tenant": tenant,
        "namespace": namespace,
        "name": name,
        "className": CLASS_NAME,
        "runtime": "PYTHON",
        "py": f"{_NAME}.zip",
        "inputSpecs": {
            topic: {"receiverQueueSize": _WORKERS_QUEUE} for topic in source_topics(description)
        },
        "subName": SUBSCRIPTION,
        "subscriptionPosition": "Earliest",
        # Without these, a failed send loses its message, and `delete` loses parked messages.
        "processingGuarantees": "MANUAL",
        "autoAck": False,
        "cleanupSubscription": False,
        "parallelism": options.parallelism,
        "resources": {"cpu": options.cpu, "ram": options.ram_mb * _MB},
        "userConfig": {
            **{name: value for name, value in asdict(settings).items() if value is not None},
            "version": __version__,
        },
    }


def deploy(
    connection: Connection, description: LevelTopicDescription, options: FunctionOptions
) -> Deployed:
    """Register the Function of a level topic, or replace the existing one.

    Raises:
        LevelTopicError: a Function may not move this level topic, or there is no functions worker.
        AdminError: the worker refused the Function.
    """
    config = function_config(description, connection, options)
    function = function_name(description)
    with FunctionsWorker(connection) as worker:
        existing = worker.config(function)
        if existing is not None:
            _check_ours(function, existing, description)
        worker.register(function, config, build(), update=existing is not None)
    return Deployed(function, existing is not None, config)


def delete(connection: Connection, description: LevelTopicDescription) -> str:
    """Remove the Function, and return its name; messages and acknowledgements stay.

    Raises:
        LevelTopicError: the Function is not deployed, or its removal would delete the
            subscriptions, and with them the parked messages.
    """
    function = function_name(description)
    with FunctionsWorker(connection) as worker:
        existing = worker.config(function)
        if existing is None:
            raise not_deployed(function)
        _check_ours(function, existing, description)
        if existing.get("cleanupSubscription", True):
            raise LevelTopicError(
                f"function {function} is registered with cleanupSubscription=true: removing it "
                f"would delete the parked messages. Run `delaylevel mover deploy {shell(function)}`"
                " first, which sets it to false, and then delete it"
            )
        worker.delete(function)
    return function


def not_deployed(function: str) -> LevelTopicError:
    """Return the error for a function that is not registered."""
    return LevelTopicError(
        f"function {function} is not deployed: `delaylevel mover deploy {shell(function)}`"
    )


def _check_ours(
    function: str, existing: dict[str, Any], description: LevelTopicDescription
) -> None:
    topic = (existing.get("userConfig") or {}).get("level_topic")
    if existing.get("className") != CLASS_NAME or topic != description.topic:
        what = f"moves {topic}" if topic else f"is {existing.get('className')}"
        raise LevelTopicError(
            f"function {function} exists and {what}: create a level topic of another name, or "
            "delete that function"
        )


# -- the archive

_NAME = "delaylevel-function"
# Imports of the Function, but for `pulsar-client[functions]`: the worker's Python has it anyway.
_ROOTS: tuple[str, ...] = ("pydantic", "urllib3", "certifi", "platformdirs")
if sys.version_info < (3, 11):
    _ROOTS += ("tomli",)
# Caches, and programs in the folders of another place.
_EXCLUDED_FOLDERS = frozenset({"__pycache__", "..", "/"})
# With a fixed date, the same files give the same archive.
_DATE = (2020, 1, 1, 0, 0, 0)


def build() -> bytes:
    """Return the Function as one archive that a worker runs without a network, and without pip."""
    # The packages that are installed here fit a Python of the same minor version on the same kind
    # of machine. A worker would install wheels in ``deps/`` by pip at each start of an instance.
    # What is in ``src/`` is only put on the path. A distribution may record a file twice.
    files = dict(_project_files()) | dict(_installed_files())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for inside, content in sorted(files.items()):
            if not _EXCLUDED_FOLDERS & set(PurePosixPath(inside).parts):
                entry = zipfile.ZipInfo(f"{_NAME}/src/{inside}", _DATE)
                entry.external_attr = 0o644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)
    return buffer.getvalue()


def _project_files() -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files of this project."""
    # Two packages, because in a checkout their folders are not inside each other.
    for package in ("delaylevel", "delaylevel.functions"):
        # Import paths, not metadata: an editable install records no files.
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations if spec is not None else None) or ():
            root = Path(location)
            for path in filter(Path.is_file, root.rglob("*")):
                inside = Path(package.replace(".", "/"), path.relative_to(root))
                yield inside.as_posix(), path.read_bytes()


def _installed_files() -> Iterator[tuple[str, bytes]]:
    for name in _distributions():
        for file in importlib.metadata.files(name) or ():
            path = Path(str(file.locate()))
            if path.is_file():
                yield file.as_posix(), path.read_bytes()


def _distributions() -> Sequence[str]:
    """Return the installed distributions of the imports, and of their requirements."""
    queue = list(_ROOTS)
    found: set[str] = set()
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()  # PEP 503
        if name in found or name == "delaylevel":
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of another platform or Python version
        found.add(name)
        for line in requirements:
            requirement, _, marker = line.partition(";")
            matched = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
            if matched is not None and "extra" not in marker:
                queue.append(matched.group())
    return sorted(found)
