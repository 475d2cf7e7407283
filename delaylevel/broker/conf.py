"""Configuration of one embedded broker: files, command line and environment."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import sys
from pathlib import Path

from delaylevel.cluster.connection.local_brokers import SavedInstance

log = logging.getLogger(__name__)

ConfValue = str | int | float | bool

# Environment variables of another Pulsar or BookKeeper on the same machine, not to be inherited.
_FOREIGN_PREFIXES = ("PULSAR_", "BOOKIE_", "BK_", "OTEL_")

_OUR_DEFAULTS = {
    # With true, a Shared subscription of 4.0.8 receives some delayed entries twice while others
    # are published: the end of one dispatch starts another read before the next dispatch runs.
    "dispatcherDispatchMessagesInSubscriptionThread": "false",
    # Without it, the storage node (bookie) ignores the port of the command line and takes one from
    # the range for outgoing connections.
    "allowEphemeralPorts": "true",
    # Pulsar's own for a cluster. That of standalone, 10 GB, needs a note at each new level topic.
    "backlogQuotaDefaultLimitGB": "-1",
    # One write then becomes one piece of the journal, which kill() does not tear.
    "journalWriteBufferSizeKB": "8192",
}


def conf_text(value: ConfValue) -> str:
    """Return a value in the syntax of Pulsar's configuration files."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _loopback() -> dict[str, str]:
    """Return the settings that bind the storage node to loopback, by interface, not by address."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {"listeningInterface": min(names)} if names else {}


def write_conf(home: Path, folder: Path, instance: SavedInstance) -> None:
    """Replace the ``conf`` folder of an instance by the server's, with its ports and settings.

    A setting that only the functions worker knows, such as ``useTls``, goes into its file. One that
    no configuration file mentions causes a warning, because Pulsar ignores it silently.
    """
    overrides = instance.conf
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "conf", folder)
    known = _names(home / "conf")
    worker = folder / "functions_worker.yml"
    worker_text = worker.read_text(encoding="utf-8")
    workers = set(re.findall(r"(?m)^(?:# ?)?(\w+):", worker_text)) - known
    for name in sorted(overrides.keys() - known - workers):
        log.warning(
            "no configuration file of the broker mentions %r, so it may have no effect: check it",
            name,
        )
    data = folder.parent
    settings = {
        **_OUR_DEFAULTS,
        # By default, all instances share one folder of the server for the packages of functions.
        "STORAGE_PATH": f"{data}/data/packages",
        **{name: value for name, value in overrides.items() if name not in workers},
        "brokerServicePort": str(instance.service_port),
        "webServicePort": str(instance.web_port),
        "bindAddress": "127.0.0.1",
        **_loopback(),
    }
    path = folder / "standalone.conf"
    kept = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.partition("=")[0].strip() not in settings
    ]
    added = [f"{name}={value}" for name, value in settings.items()]
    path.write_text("\n".join([*kept, *added, ""]), encoding="utf-8")

    for name in sorted(overrides.keys() & workers):
        worker_text = re.sub(rf"(?m)^{name}:.*\n", "", worker_text)
        worker_text += f"\n{name}: {json.dumps(overrides[name])}"
    text = re.sub(r"(?m)^downloadDirectory:.*$", f"downloadDirectory: {data}/download", worker_text)
    text = re.sub(r"(?m)^(\s+logDirectory:).*$", rf"\1 {data}/logs", text)
    worker.write_text(text, encoding="utf-8")


def _names(conf: Path) -> set[str]:
    files = ("standalone.conf", "broker.conf", "bookkeeper.conf")
    text = "\n".join((conf / file).read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"(?m)^\s*#?\s*([A-Za-z_][\w.]*)=", text))


def start_command(home: Path, directory: Path, instance: SavedInstance) -> list[str]:
    """Return the command that starts the instance, without stream storage (``-nss``)."""
    # `bin/pulsar` replaces itself by the JVM, which so has the process ID of the command.
    return [
        str(home / "bin" / "pulsar"),
        "standalone",
        "-a",
        "127.0.0.1",
        "-nss",
        *(
            ["--functions-worker-conf", str(directory / "conf" / "functions_worker.yml")]
            if instance.functions
            else ["-nfw"]
        ),
        "--bookkeeper-port",
        str(instance.bookie_port),
        "--bookkeeper-dir",
        str(directory / "data" / "bookkeeper"),
        "--metadata-dir",
        str(directory / "data" / "metadata"),
    ]


def environment(directory: Path, instance: SavedInstance, java: str) -> dict[str, str]:
    """Return the environment of the instance: a small heap, and no settings of another Pulsar."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name != "OPTS"
    }
    path = [str(Path(java).parent), environ.get("PATH", os.defpath)]
    if instance.functions:
        # The functions worker starts `python3` from the PATH: it must be able to import delaylevel.
        path.insert(0, str(Path(sys.executable).parent))
    heap_mb = instance.heap_mb
    return environ | {
        "PATH": os.pathsep.join(path),
        "PULSAR_STANDALONE_CONF": str(directory / "conf" / "standalone.conf"),
        "PULSAR_LOG_CONF": str(directory / "conf" / "log4j2.yaml"),
        "PULSAR_LOG_DIR": str(directory / "logs"),
        "PULSAR_MEM": f"-Xms64m -Xmx{heap_mb}m -XX:MaxDirectMemorySize={max(heap_mb, 300)}m",
        "PULSAR_GC": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "PULSAR_GC_LOG": "-Xlog:disable",
    }
