"""The configuration files and the command of one embedded broker instance."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

ConfValue = str | int | float | bool

# What a start must not inherit: settings of another Pulsar or BookKeeper on the same machine.
_FOREIGN = ("PULSAR_", "BOOKIE_", "BK_", "OTEL_")

_BETTER_THAN_DEFAULT = {
    # With true, a Shared subscription of 4.0.8 gets some delayed entries twice while others are
    # published: the end of one dispatch lets a read begin anew before the next dispatch has run.
    "dispatcherDispatchMessagesInSubscriptionThread": "false",
    # Without it the storage node (bookie) does not take the port that the command line gives it,
    # but one of those that the system gives to outgoing connections as well.
    "allowEphemeralPorts": "true",
    # What is written at once stands in one piece of the journal, also when it is killed (kill()).
    "journalWriteBufferSizeKB": "8192",
}


def conf_text(value: ConfValue) -> str:
    """A value as Pulsar's configuration files spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _loopback() -> dict[str, str]:
    """What binds the storage node to loopback, too: it knows interfaces, not addresses."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {"listeningInterface": min(names)} if names else {}


def write_conf(
    home: Path,
    folder: Path,
    *,
    service_port: int,
    web_port: int,
    overrides: Mapping[str, str],
) -> None:
    """Copy the server's ``conf`` folder for one instance, with its ports and overrides.

    A name in ``overrides`` that only the functions worker knows, such as ``useTls``, goes into its
    file. One that no configuration file of the server mentions is warned about: Pulsar itself
    ignores it in silence.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "conf", folder)
    known = _names(home / "conf")
    worker = folder / "functions_worker.yml"
    worker_text = worker.read_text(encoding="utf-8")
    workers = set(re.findall(r"(?m)^(?:# ?)?(\w+):", worker_text)) - known
    for name in sorted(overrides.keys() - known - workers):
        log.warning("the broker's configuration files do not know %r; it may have no effect", name)
    data = folder.parent
    settings = {
        **_BETTER_THAN_DEFAULT,
        # Otherwise all instances keep the packages of their functions in one folder of the server.
        "STORAGE_PATH": f"{data}/data/packages",
        **{name: value for name, value in overrides.items() if name not in workers},
        "brokerServicePort": str(service_port),
        "webServicePort": str(web_port),
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
    names: set[str] = set()
    for file in ("standalone.conf", "broker.conf", "bookkeeper.conf"):
        text = (conf / file).read_text(encoding="utf-8")
        names.update(re.findall(r"(?m)^\s*#?\s*([A-Za-z_][\w.]*)=", text))
    return names


def command(home: Path, directory: Path, *, functions: bool, bookie_port: int) -> list[str]:
    """What starts the instance; ``bin/pulsar`` becomes the JVM, so its pid is the JVM's.

    Without the stream storage (``-nss``) and, unless asked for, without the functions worker.
    """
    return [
        str(home / "bin" / "pulsar"),
        "standalone",
        "-a",
        "127.0.0.1",
        "-nss",
        *(
            ["--functions-worker-conf", str(directory / "conf" / "functions_worker.yml")]
            if functions
            else ["-nfw"]
        ),
        "--bookkeeper-port",
        str(bookie_port),
        "--bookkeeper-dir",
        str(directory / "data" / "bookkeeper"),
        "--metadata-dir",
        str(directory / "data" / "metadata"),
    ]


def environment(directory: Path, *, java: str, functions: bool, heap_mb: int) -> dict[str, str]:
    """The environment of the instance: a small heap, and nothing of another Pulsar's."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name != "OPTS"
    }
    path = [str(Path(java).parent), environ.get("PATH", os.defpath)]
    if functions:
        # The functions worker starts `python3` from the PATH: it must be the one that has us.
        path.insert(0, str(Path(sys.executable).parent))
    return environ | {
        "PATH": os.pathsep.join(path),
        "PULSAR_STANDALONE_CONF": str(directory / "conf" / "standalone.conf"),
        "PULSAR_LOG_CONF": str(directory / "conf" / "log4j2.yaml"),
        "PULSAR_LOG_DIR": str(directory / "logs"),
        "PULSAR_MEM": f"-Xms64m -Xmx{heap_mb}m -XX:MaxDirectMemorySize={max(heap_mb, 300)}m",
        "PULSAR_GC": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "PULSAR_GC_LOG": "-Xlog:disable",
    }
