"""Write docs/cli.md and docs/api.md anew, from the commands' help and the sources' docstrings.

python tools/make_reference.py            # write them
python tools/make_reference.py --check    # exit 1 if one of them is not current
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NOTE = "<!-- Made by tools/make_reference.py: `make reference`. Changes here are lost. -->\n"

# What is public, and what to say of it; in this order.
MODULES = {
    "delaylevel": "The front: what an application needs.",
    "delaylevel.asyncio": "The twins beside `pulsar.asyncio`.",
    "delaylevel.testing": "An in-memory Pulsar and a manual clock, for tests without a broker.",
    "delaylevel.errors": "All errors have one root.",
    "delaylevel.config": "Where the cluster is.",
    "delaylevel.model.level_topic": "What a level topic says of itself.",
    "delaylevel.topics": "Making and finding level topics.",
    "delaylevel.topics.lifecycle": "Expanding, draining, deleting; orphans.",
    "delaylevel.mover.dead_letters": "Dead letters.",
    "delaylevel.topics.status": "How a level topic stands.",
    "delaylevel.spark_sync": "The Spark job.",
    "delaylevel.functions.deployment": "The Function: deploying it.",
    "delaylevel.functions.health": "The Function: how it stands.",
    "delaylevel.dispatcher": "The dispatcher.",
    "delaylevel.inspection": "What is pending.",
    "delaylevel.doctor": "What is wrong.",
    "delaylevel.model.plan": "What a load takes.",
    "delaylevel.metrics": "Figures for Prometheus.",
    "delaylevel.admin": "The admin REST client.",
    "delaylevel.broker": "A real broker of your own.",
    "delaylevel.model.router": "The decision itself: a pure function of due time and clock.",
}
_FOLDERS = {"delaylevel.spark_sync": "spark_sync", "delaylevel.functions": "functions"}


# -- commands


def cli_page() -> str:
    """Return docs/cli.md."""
    from delaylevel.cli.main import cli

    lines = [NOTE, "# Commands", ""]
    lines += ["Every command has this as its `--help`. Times are ISO, epoch milliseconds or `+2h`;"]
    lines += ["durations `90s`, `2h30m`, `3d`. Exit codes: 0 done, 1 failed, 2 wrong usage, 3"]
    lines += ["broker not reached.", ""]
    for path, command, context in _commands(cli, ("delaylevel",), None):
        lines += [
            f"{'#' * min(4, len(path) + 1)} {' '.join(path)}",
            "",
            *_command(command, context),
        ]
    return "\n".join(lines).rstrip() + "\n"


def _commands(
    command: click.Command, path: tuple[str, ...], parent: click.Context | None
) -> Iterator[tuple[tuple[str, ...], click.Command, click.Context]]:
    context = click.Context(command, info_name=path[-1], parent=parent)
    yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _commands(child, (*path, name), context)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from ("```text", usage, "```", "")
    yield from (_escaped(_plain(command.help or "")), "")
    options = [
        record
        for parameter in command.params
        if isinstance(parameter, click.Option)  # newer versions of click list arguments, too
        and (record := parameter.get_help_record(context))
        and "--help" not in record[0]
    ]
    if options:
        yield from ("| option | what |", "|---|---|")
        for names, text in options:
            yield f"| `{_cell(names)}` | {_escaped(_cell(' '.join(text.split())))} |"
        yield ""
    examples = _plain(command.epilog or "").partition("Examples:")[2].strip("\n")
    if examples:
        yield from ("```sh", *(line.strip() for line in examples.splitlines()), "```", "")


def _plain(text: str) -> str:
    lines = inspect.cleandoc(text).splitlines()
    return "\n".join(line for line in lines if line.strip() != "\b").strip()


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _escaped(text: str) -> str:
    return text.replace("*", r"\*").replace("<", r"\<")


# -- names


@dataclass(frozen=True)
class Definition:
    """A public class or function, as the source has it."""

    name: str
    module: str
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def api_page() -> str:
    """Return docs/api.md."""
    lines = [NOTE, "# Names", ""]
    lines += [
        "What is public, with its parameters. Times inside are milliseconds since the epoch, in"
    ]
    lines += ["names that end in `_ms`; at the edge they are `timedelta` and aware `datetime`.", ""]
    lines += [f"- [{name}](#{name.replace('.', '')}): {MODULES[name]}" for name in MODULES]
    for module, says in MODULES.items():
        lines += ["", f"## {module}", "", says]
        for definition in public(module):
            lines += ["", *_definition(definition)]
    return "\n".join(lines).rstrip() + "\n"


def public(module: str) -> list[Definition]:
    """Return the public classes and functions of a module, in the order of its own list."""
    tree = _tree(module)
    named = _all_of(tree)
    found = []
    names = named if named is not None else _defined(tree)
    for name in names:
        definition = _resolve(module, name)
        if definition is not None:
            found.append(definition)
    return found


def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))


def _path(module: str) -> Path:
    relative = Path(*module.split("."))
    for name, folder in _FOLDERS.items():
        if module == name or module.startswith(f"{name}."):
            relative = (
                Path(folder, *module[len(name) + 1 :].split("."))
                if module != name
                else Path(folder)
            )
    package = ROOT / relative / "__init__.py"
    return package if package.exists() else (ROOT / relative).with_suffix(".py")


def _all_of(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def _defined(tree: ast.Module) -> list[str]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")
    ]


def _resolve(module: str, name: str) -> Definition | None:
    """Find where a name is defined; None for what is neither class nor function."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    package = module if _path(module).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_tree(module)):
        if isinstance(node, kinds) and node.name == name:
            return Definition(name, module, node)
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            origin = f"{package}.{node.module}" if node.level else str(node.module)
            return _resolve(origin, name) if origin.startswith("delaylevel") else None
    return None


def _definition(definition: Definition) -> Iterator[str]:
    node = definition.node
    yield f"### {definition.name}"
    yield ""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        kind = f"class {node.name}({bases})" if bases else f"class {node.name}"
        yield from ("```text", kind, "", *_text(node), "```")
        methods = (ast.FunctionDef, ast.AsyncFunctionDef)
        shown = [item for item in node.body if isinstance(item, methods) and _shown(item)]
        if shown:
            yield ""
        for item in shown:
            mark = "" if _is_property(item) else _arguments(item)
            first = "\n".join(_text(item)).split("\n\n")[0]
            yield f"- `{item.name}{mark}`: {_escaped(' '.join(first.split()))}"
    else:
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        yield from ("```text", f"{prefix}{node.name}{_arguments(node)}", "", *_text(node), "```")


def _shown(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    overload = any("overload" in ast.unparse(item) for item in node.decorator_list)
    setter = any(ast.unparse(item).endswith(".setter") for item in node.decorator_list)
    return not node.name.startswith("_") and not overload and not setter


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(item) for item in node.decorator_list)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(arguments, (ast.FunctionDef, ast.AsyncFunctionDef))
    first = [*arguments.args.posonlyargs, *arguments.args.args][:1]
    if first and first[0].arg in ("self", "cls") and arguments.args.args:
        arguments.args.args.pop(0)
    returns = f" -> {ast.unparse(arguments.returns)}" if arguments.returns else ""
    return f"({ast.unparse(arguments.args)}){returns}"


def _text(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    text = ast.get_docstring(node) or ""
    # reStructuredText's roles and double backquotes are noise here.
    text = re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "`")
    return text.splitlines()


PAGES = {"cli.md": cli_page, "api.md": api_page}


def main(arguments: list[str]) -> int:
    """Write or check the pages; return the exit code."""
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in arguments:
            stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name} written", file=sys.stderr)
    if stale:
        print(f"not current: {', '.join(stale)}; run `make reference`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
