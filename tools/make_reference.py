"""Generator of build/commands.md, one page with the help of all commands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

PAGE = Path(__file__).resolve().parents[1] / "build" / "commands.md"


def commands_page() -> str:
    """Return the page."""
    from delaylevel.cli.main import cli

    lines = ["# Commands", ""]
    lines += ["This page has the `--help` of every command. Times are ISO-8601, epoch milliseconds"]
    lines += ["or `+2h`; durations are `90s`, `2h30m`, `3d`. Exit codes: 0 done, 1 failed, 2 wrong"]
    lines += ["usage, 3 broker not reached.", ""]
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
    settings = command.context_settings
    context = click.Context(command, info_name=path[-1], parent=parent, **settings)
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
        yield from ("| option | meaning |", "|---|---|")
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


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(commands_page(), encoding="utf-8")
    print(PAGE)
