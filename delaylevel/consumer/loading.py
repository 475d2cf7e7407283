"""Import of an application's listeners by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from delaylevel.errors import ConfigError, DelayLevelError

from .listeners import Listeners

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def split_target(target: str) -> tuple[str, str]:
    """Return module and name of ``module:name``; the name is empty if it is left out.

    Raises:
        ConfigError: it is not of this form.
    """
    module, colon, name = target.partition(":")
    if target.endswith(".py") or "/" in target or os.sep in target:
        dotted = ".".join(Path(module).with_suffix("").parts).strip("./\\")
        hint = f"{dotted}:{name or 'app'}"
        raise ConfigError(f"{target} is a path: write the name of the module, {hint}")
    if not _MODULE.fullmatch(module) or (colon and not _MODULE.fullmatch(name)):
        raise ConfigError(f"{target!r} is not MODULE:NAME: write, for example, shop.billing:app")
    return module, name


def load(target: str, folder: str | os.PathLike[str] = ".") -> Listeners:
    """Import a module, and return the listeners that it defines.

    Args:
        target: ``module:name``. The name is that of a :class:`Listeners`, or of a function without
            arguments that returns one; it may be left out if the module has only one.
        folder: folder that is searched first.

    Raises:
        ConfigError: there is no such module or name, the name is something else, or the import
            failed; the text has the place of the failure.
        DelayLevelError: a listener is wrong.
    """
    module_name, name = split_target(target)
    path = str(Path(folder).absolute())
    if path not in sys.path:
        sys.path.insert(0, path)
    module = _imported(module_name, path)
    if not name:
        return _only_one(module, target)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            others = ", ".join(_names(module)) or "none; write app = Listeners(client)"
            raise ConfigError(
                f"{module_name} has no name {name} (its listeners: {others})"
            ) from None
    if inspect.isfunction(found):
        found = _made(found, target)
    if not isinstance(found, Listeners):
        raise ConfigError(f"{target} is no Listeners, but of type {type(found).__name__}")
    if not found.listeners:
        raise ConfigError(
            f"{target} has no listeners: decorate functions with @{name}.on(...), in this module "
            "or in one that it imports"
        )
    return found


def source_folder(target: str, folder: str | os.PathLike[str] = ".") -> Path:
    """Return the folder of the sources of a module's topmost package, without importing it.

    Raises:
        ConfigError: there is no such module.
    """
    module_name, _ = split_target(target)
    path = str(Path(folder).absolute())
    if path not in sys.path:
        sys.path.insert(0, path)
    top = module_name.partition(".")[0]
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise _no_module(top, path)
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin or path).parent


def _imported(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except DelayLevelError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise _no_module(missing, path) from None
        raise ConfigError(f"importing {name} failed:\n{_trace(error)}") from error


def _no_module(name: str, path: str) -> ConfigError:
    return ConfigError(
        f"there is no module {name} in {path} or in this Python's packages: check the name, or "
        "change to the folder that contains it"
    )


def _made(function: Any, target: str) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError:
        raise ConfigError(
            f"{target} is a function with arguments: name a Listeners, or a function without "
            "arguments that returns one"
        ) from None
    try:
        return function()
    except DelayLevelError:
        raise
    except Exception as error:
        raise ConfigError(f"calling {target} failed:\n{_trace(error)}") from error


def _only_one(module: Any, target: str) -> Listeners:
    names = _names(module)
    if len(names) != 1:
        choice = f"one of {', '.join(names)}" if names else "app = Listeners(client)"
        raise ConfigError(
            f"{target} has {len(names) or 'no'} Listeners, so name one: {target}:NAME ({choice})"
        )
    return load(f"{target}:{names[0]}")


def _names(module: Any) -> list[str]:
    found: dict[int, str] = {}
    for name, value in vars(module).items():
        if isinstance(value, Listeners):
            found.setdefault(id(value), name)
    return list(found.values())


def _trace(error: Exception) -> str:
    """Return the traceback of an error, without the frames of the import machinery and of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    lines = [
        *traceback.format_list(own),
        *traceback.format_exception_only(type(error), error),
    ]
    return "".join(lines).rstrip()
