"""The Function as one archive that a worker installs without a network.

``NAME/src/`` contains this project, without the parts for Spark and the command line.
``NAME/deps/`` contains wheels of its requirements, except for ``pulsar-client[functions]``, which
the worker's Python needs to run any Function. The wheels are made from the packages installed here,
so they fit a Python of the same minor version on the same kind of machine. For another Python they
are downloaded on this machine when the archive is built; a worker never downloads anything.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from delaylevel.errors import ConfigError
from delaylevel.installed import distribution_files, distributions, project_files

NAME = "delaylevel-function"
FILE_NAME = f"{NAME}.zip"
PARTS = ("delaylevel", "delaylevel.functions")
# Imports of the Function besides pulsar.
ROOTS: tuple[str, ...] = ("pydantic", "urllib3", "certifi", "platformdirs")
if sys.version_info < (3, 11):
    ROOTS += ("tomli",)
# Parts of the core that a Function never uses.
_NOT_SHIPPED = (
    "delaylevel/testing/",
    "delaylevel/demo.py",
    "delaylevel/spark_sync/",
    "delaylevel/inspection/",
)
_NOT_IN_WHEELS = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
# With a fixed date, the same files give the same archive.
_DATE = (2020, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class WorkerPython:
    """The workers' Python, if it differs from the one here.

    Attributes:
        version: e.g. ``3.11``.
        platform: platform tag of wheels, e.g. ``manylinux2014_x86_64``.
    """

    version: str
    platform: str


def build(worker: WorkerPython | None = None) -> bytes:
    """Return the archive, as a zip file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for inside, path in sorted(project_files(PARTS)):
            if not inside.startswith(_NOT_SHIPPED):
                _put(archive, f"{NAME}/src/{inside}", path.read_bytes())
        names = distributions(ROOTS)
        wheels = map(repack, names) if worker is None else _download(worker, names)
        for name, wheel in sorted(wheels):
            _put(archive, f"{NAME}/deps/{name}", wheel, stored=True)
    return buffer.getvalue()


def repack(name: str) -> tuple[str, bytes]:
    """Return the file name and the content of a wheel made from an installed distribution."""
    found = importlib.metadata.distribution(name)
    record: list[tuple[str, str, int | str]] = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
        info = ""
        # A record may list a file twice.
        for inside, path in sorted(dict(distribution_files(name)).items()):
            if path.name in _NOT_IN_WHEELS:
                continue
            content = path.read_bytes()
            _put(wheel, inside, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append((inside, f"sha256={digest.decode()}", len(content)))
            if PurePosixPath(inside).name == "WHEEL":
                info = str(PurePosixPath(inside).parent)
        if not info:
            raise ConfigError(
                f"{name} was not installed from a wheel, so no wheel can be made of it: name the "
                "workers' Python and platform to download it"
            )
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*record, (f"{info}/RECORD", "", "")])
        _put(wheel, f"{info}/RECORD", text.getvalue().encode())
    return f"{info.removesuffix('.dist-info')}-{_tag(found)}.whl", buffer.getvalue()


def _download(worker: WorkerPython, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--python-version", worker.version]
    command += ["--platform", worker.platform, "--implementation", "cp"]
    command += [f"{name}=={importlib.metadata.version(name)}" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [*command, "--dest", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            raise ConfigError(
                f"pip cannot download wheels for Python {worker.version} on {worker.platform}: "
                f"{answer.stderr.strip()[-400:]}"
            )
        return [(path.name, path.read_bytes()) for path in Path(folder).glob("*.whl")]


def _tag(found: importlib.metadata.Distribution) -> str:
    """Return the tags in a wheel's file name; dots join several tags of a kind."""
    lines = (found.read_text("WHEEL") or "").splitlines()
    tags = [line.partition(":")[2].strip().split("-") for line in lines if line.startswith("Tag:")]
    return "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))


def _put(archive: zipfile.ZipFile, name: str, content: bytes, stored: bool = False) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)
