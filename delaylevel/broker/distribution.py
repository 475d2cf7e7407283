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
from contextlib import contextmanager
from pathlib import Path

from delaylevel.cluster.local_brokers import DIRECTORIES
from delaylevel.errors import PrerequisiteError

PULSAR_VERSION = "4.0.8"
MINIMUM_JAVA = 17
_ARTIFACT = f"org.apache.pulsar:pulsar-server-distribution:{PULSAR_VERSION}:tar.gz:bin"
_MAVEN_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
_MAVEN_TIMEOUT_SECONDS = 1800

Report = Callable[[str], None]


def distribution_directory() -> Path:
    """Return the directory of the fetched server: ``$XDG_CACHE_HOME/delaylevel/…``."""
    return Path(DIRECTORIES.user_cache_dir) / f"apache-pulsar-{PULSAR_VERSION}"


def is_fetched() -> bool:
    """Return whether the server is fetched."""
    return (distribution_directory() / "bin" / "pulsar").is_file()


def fetch(report: Report = lambda message: None) -> Path:
    """Fetch and unpack the Pulsar server, once even if several processes call this.

    Maven uses the user's own settings (mirrors, proxies, local repository).

    Args:
        report: function that receives lines about the progress.

    Returns:
        The directory of the server.

    Raises:
        PrerequisiteError: Java or Maven is missing, or Maven cannot fetch the server.
    """
    home = distribution_directory()
    if is_fetched():
        return home
    java()
    home.parent.mkdir(parents=True, exist_ok=True)
    with locked(home.with_name(f"{home.name}.lock")):
        if is_fetched():
            return home
        with tempfile.TemporaryDirectory(dir=home.parent, prefix="fetch-") as scratch:
            report(f"Fetching the Pulsar server {PULSAR_VERSION} with Maven (about 240 MB) ...")
            archive = _download(Path(scratch))
            report("Unpacking it ...")
            unpacked = _unpack(archive, Path(scratch))
            shutil.rmtree(home, ignore_errors=True)  # an incomplete tree of an earlier version
            unpacked.rename(home)
    report(f"The server is in {home}")
    return home


def java() -> str:
    """Return the path of the ``java`` program in ``JAVA_HOME`` or, without it, on the PATH.

    Raises:
        PrerequisiteError: Java is missing or too old.
    """
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
    try:
        answer = subprocess.run(
            [found, "-version"],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrerequisiteError(f"{found} does not run ({error}). {remedy}") from error
    version = java_version(answer.stderr + answer.stdout)
    if answer.returncode != 0 or version is None:
        raise PrerequisiteError(f"{found} does not print its version. {remedy}")
    if version < MINIMUM_JAVA:
        raise PrerequisiteError(f"{found} is Java {version}, which is too old. {remedy}")
    return found


def java_version(text: str) -> int | None:
    """Return the major version in the output of ``java -version``; 8 for ``1.8.0``."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes during the block; the system releases it if we die."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _download(folder: Path) -> Path:
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
        f"-Dartifact={_ARTIFACT}",
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
            f"Maven did not fetch {_ARTIFACT} within {_MAVEN_TIMEOUT_SECONDS // 60} minutes: "
            "check the network and try again."
        ) from None
    archives = sorted(folder.glob("pulsar-server-distribution-*.tar.gz"))
    if answer.returncode != 0 or not archives:
        output = [line for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        raise PrerequisiteError(
            f"Maven could not fetch {_ARTIFACT} (exit code {answer.returncode}). Check the network "
            "and Maven's settings.xml. Its output:\n  " + "\n  ".join(output[:5])
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
    except (tarfile.TarError, EOFError, OSError) as error:
        raise PrerequisiteError(
            f"{archive.name} cannot be unpacked ({error}). Check that the disk is not full, or "
            "delete the file from Maven's local repository and fetch it again."
        ) from error
    trees = [path for path in target.iterdir() if (path / "bin" / "pulsar").is_file()]
    if len(trees) != 1:
        raise PrerequisiteError(
            f"{archive.name} does not contain a Pulsar server. Delete the file from Maven's local "
            "repository and fetch it again."
        )
    return trees[0]
