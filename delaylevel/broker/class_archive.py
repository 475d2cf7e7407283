"""Archive of a server's classes, with which its JVM starts in two thirds of the time.

It has the classes of one start, read and verified, in a form that all JVMs share (AppCDS of the
JDK: a dynamic archive). It is valid for one build of Java and for class paths that begin with the
same entries. The JVM ignores an archive that does not fit, but one whose end is missing aborts it.

The start script begins the class path with the folder of the log configuration, which differs from
instance to instance. So with an archive, the path begins with a folder that does not exist, and the
log configuration is named by a system property.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path


def archive_path(home: Path, java: str) -> Path:
    """Return the path of the archive of a server; it need not exist.

    Args:
        home: directory of the server.
        java: path of the ``java`` program; another build of Java has another archive.
    """
    program = Path(os.path.realpath(java))
    state = program.stat()
    build = f"{program} {state.st_size} {state.st_mtime_ns}"
    return home / f"classes-{sha256(build.encode()).hexdigest()[:12]}.jsa"


def reading(archive: Path, log_conf: Path) -> dict[str, str]:
    """Return the environment with which an instance uses an archive; empty if there is none.

    Args:
        archive: path of the archive.
        log_conf: path of the log configuration of the instance.
    """
    option = f"-XX:SharedArchiveFile={archive}"
    return _environment(archive, log_conf, option) if archive.is_file() else {}


def writing(archive: Path, log_conf: Path, target: Path) -> dict[str, str]:
    """Return the environment with which an instance writes an archive when it is stopped.

    Args:
        archive, log_conf: as for :func:`reading`.
        target: path to which the JVM writes; the caller moves the complete file.
    """
    return _environment(archive, log_conf, f"-XX:ArchiveClassesAtExit={target}")


def _environment(archive: Path, log_conf: Path, option: str) -> dict[str, str]:
    nowhere = archive.parent / "no-log-configuration"  # the same for all instances of a server
    return {
        "PULSAR_LOG_CONF": str(nowhere / log_conf.name),
        "PULSAR_EXTRA_OPTS": f"-Dlog4j.configurationFile={log_conf} {option}",
    }
