"""The configuration file, and errors about settings in our own words."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import ValidationError

from delaylevel.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "DELAYLEVEL_"
#: Tables of the file that are for applications with producers and listeners.
TABLES = ("producer", "listeners")

# Texts for the types of errors of pydantic, whose own texts name its concepts.
_TEXTS = {
    "bool": "must be true or false",
    "int": "must be a whole number",
    "float": "must be a number",
    "string": "must be a text",
    "list": "must be a list",
    "tuple": "must be a list",
    "dict": "must be a table",
    "missing": "is missing",
    "path": "must be a path",
}


def config_path(
    config_file: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> tuple[Path, bool]:
    """Return the path of the configuration file, and True if it was named and so must exist.

    Args:
        config_file: path given by the caller; else ``DELAYLEVEL_CONFIG``, else
            ``delaylevel/config.toml`` in the user's configuration directory.
        environ: the environment.
    """
    chosen = config_file or environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    if chosen:
        return Path(chosen).expanduser(), True
    return Path(platformdirs.user_config_dir("delaylevel")) / "config.toml", False


def read_config(path: Path, known: Collection[str], *, must_exist: bool) -> dict[str, Any]:
    """Return the contents of a configuration file; empty if there is none.

    Args:
        path: the file.
        known: settings of the connection. Other settings are refused, except `TABLES`.
        must_exist: True to refuse a missing file.

    Raises:
        ConfigError: the file cannot be read, or has unknown settings.
    """
    try:
        settings: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"there is no configuration file {path}") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        # Only the first line of the reason: later ones may quote the file, and so a secret.
        raise ConfigError(f"{path} is not TOML: {str(error).splitlines()[0]}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    unknown = sorted(settings.keys() - {*known, *TABLES})
    if unknown:
        raise ConfigError(
            f"{path} has unknown settings: {', '.join(unknown)} "
            f"(known: {', '.join([*known, *(f'[{table}]' for table in TABLES)])})"
        )
    return settings


def explain(error: ValidationError, places: Mapping[str, str], whole: str) -> str:
    """Return the problems of settings in one line, in our own words and without their values.

    Args:
        error: the error of the model.
        places: the source of each setting, by name.
        whole: name of the settings as a whole.
    """
    lines = []
    for detail in error.errors(include_input=False, include_url=False, include_context=False):
        name = str(detail["loc"][0]) if detail["loc"] else whole
        lines.append(f"{name} (from {places.get(name, 'the defaults')}): {_text(detail)}")
    return "; ".join(dict.fromkeys(lines))


def _text(detail: Mapping[str, Any]) -> str:
    kind = str(detail["type"])
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return "is not a setting (remove it, or correct its name)"
    for prefix, text in _TEXTS.items():
        if kind == prefix or kind.startswith(f"{prefix}_"):
            return text
    return "is not valid"
