"""The Pulsar server of the embedded broker: fetched with Maven, unpacked once per user."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from delaylevel.cluster.connection.local_brokers import DIRECTORIES
from delaylevel.errors import InvalidInputError, PrerequisiteError

#: Version of the server unless another one is chosen.
PULSAR_VERSION = "4.0.8"
MINIMUM_JAVA = 17
_VERSION = re.compile(r"\d+\.\d+\.\d+[A-Za-z0-9.-]*")
_RELEASES = "https://pulsar.apache.org/release-notes/"
_MAVEN_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
_MAVEN_TIMEOUT_SECONDS = 1800

Report = Callable[[str], None]


def distribution_directory(version: str = PULSAR_VERSION) -> Path:
    """Return the directory of a fetched server: ``$XDG_CACHE_HOME/delaylevel/…``.

    Args:
        version: the full version of the server.

    Raises:
        InvalidInputError: this is not a version of a server.
    """
    if not _VERSION.fullmatch(version):
        raise InvalidInputError(
            f"{version!r} is not the full version of a Pulsar server: use one like "
            f"{PULSAR_VERSION}. {_RELEASES} lists the releases."
        )
    return Path(DIRECTORIES.user_cache_dir) / f"apache-pulsar-{version}"


def is_fetched(version: str = PULSAR_VERSION) -> bool:
    """Return whether a server is fetched."""
    return (distribution_directory(version) / "bin" / "pulsar").is_file()


def fetch(report: Report = lambda message: None, version: str = PULSAR_VERSION) -> Path:
    """Fetch and unpack a Pulsar server, once even if several processes call this.

    Servers of several versions are kept side by side. Maven uses the user's own settings (mirrors,
    proxies, local repository).

    Args:
        report: function that receives lines about the progress.
        version: the full version of the server.

    Returns:
        The directory of the server.

    Raises:
        InvalidInputError: this is not a version of a server.
        PrerequisiteError: Java or Maven is missing, or Maven cannot fetch the server.
    """
    home = distribution_directory(version)
    if not is_fetched(version):
        home.parent.mkdir(parents=True, exist_ok=True)
        with locked(home.with_name(f"{home.name}.lock")):
            if not is_fetched(version):  # another process may have done it meanwhile
                _fetch(home, report, version)
    return home


def _fetch(home: Path, report: Report, version: str) -> None:
    java()
    with tempfile.TemporaryDirectory(dir=home.parent, prefix="fetch-") as scratch:
        report(f"Fetching the Pulsar server {version} with Maven (about 240 MB) ...")
        archive = _download(Path(scratch), version)
        report("Unpacking it ...")
        unpacked = _unpack(archive, Path(scratch))
        # The name appears with the whole tree, so a process that ends here leaves none to use.
        shutil.rmtree(home, ignore_errors=True)  # one whose files were deleted in part
        unpacked.rename(home)
    report(f"The server is in {home}")


def java() -> str:
    """Return the path of the ``java`` program in ``JAVA_HOME`` or, without it, on the PATH."""
    remedy = (
        f"Install Java {MINIMUM_JAVA} or later (Debian and Ubuntu: apt install "
        f"openjdk-{MINIMUM_JAVA}-jre-headless; macOS: brew install openjdk@{MINIMUM_JAVA}), "
        "or set JAVA_HOME to one."
    )
    java_home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(java_home) / "bin" / "java") if java_home else "java")
    if found is None:
        place = f"JAVA_HOME ({java_home})" if java_home else "the PATH"
        raise PrerequisiteError(f"The embedded broker needs Java: none is in {place}. {remedy}")
    output = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        output = subprocess.run(
            [found, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        ).stdout
    match = re.search(r'version "(?:1\.)?(\d+)', output)  # 8 is written as 1.8.0
    if match is None:
        raise PrerequisiteError(f"{found} does not print its version. {remedy}")
    if int(match[1]) < MINIMUM_JAVA:
        raise PrerequisiteError(f"{found} is Java {match[1]}, which is too old. {remedy}")
    return found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes during the block; the system releases it if we die."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _download(folder: Path, version: str) -> Path:
    artifact = f"org.apache.pulsar:pulsar-server-distribution:{version}:tar.gz:bin"
    maven = shutil.which("mvn")
    if maven is None:
        raise PrerequisiteError(
            "The embedded broker is fetched with Maven, and `mvn` is not on the PATH. Install it "
            "(Debian and Ubuntu: apt install maven; macOS: brew install maven)."
        )
    command = [
        maven,
        "--batch-mode",
        "--quiet",
        "--strict-checksums",
        _MAVEN_GOAL,
        f"-Dartifact={artifact}",
        f"-DoutputDirectory={folder}",
    ]
    try:
        # In an empty folder, so that no pom.xml of a project applies.
        answer = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MAVEN_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PrerequisiteError(
            f"Maven did not fetch {artifact} within {_MAVEN_TIMEOUT_SECONDS // 60} minutes: "
            "check the network and try again."
        ) from None
    archives = sorted(folder.glob("pulsar-server-distribution-*.tar.gz"))
    if answer.returncode != 0 or not archives:
        output = [line for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        raise PrerequisiteError(
            f"Maven could not fetch {artifact} (exit code {answer.returncode}). Check the version "
            f"({_RELEASES} lists the releases), the network and Maven's settings.xml. Its output:"
            "\n  " + "\n  ".join(output[:5])
        )
    return archives[0]


def _unpack(archive: Path, folder: Path) -> Path:
    target = folder / "unpacked"
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(target, filter="data")
            else:  # Python before 3.10.12 and 3.11.4
                tar.extractall(target)
        (program,) = target.glob("*/bin/pulsar")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise PrerequisiteError(
            f"{archive.name} cannot be unpacked ({error}). Check that the disk is not full, or "
            "delete the file from Maven's local repository and fetch it again."
        ) from error
    return program.parents[1]
