"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import Expired, FinalWindow, MissingTarget, Mover
from delaylevel.model.topic_name import parse_namespace

from .output import FORMATS
from .values import DURATION, DURATION_MS, TIME, OneOf, parse_pairs

Function = TypeVar("Function", bound=Callable[..., Any])


pairs = functools.partial(click.option, multiple=True, metavar="KEY=VALUE", callback=parse_pairs)


output = click.option(
    "-o", "--output", type=click.Choice(FORMATS), default="table", help="Format of the result."
)
delivery = click.option(
    "--delivery",
    type=OneOf(Delivery),
    default=Delivery.AT_LEAST_ONCE.value,
    help="Delivery guarantee; effectively-once needs the broker's deduplication.",
)
trigger = click.option(
    "--trigger",
    "trigger_ms",
    type=DURATION_MS,
    help="Interval between the mover's batches; by default a fifth of the shortest lead.",
)
everything = click.option(
    "--all", "everything", is_flag=True, help="Include everything instead of a selection."
)
#: Help of ``--namespace`` and of ``--once``, which several commands have.
NAMESPACE = "Namespace whose level topics are meant if no TOPIC is given."
ONCE = "End when everything that is ready or due is done, e.g. from cron."
spill_dir = click.option(
    "--spill-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the dispatcher's spill files.",
)
mover = click.option(
    "--mover",
    type=OneOf(Mover),
    default=Mover.SPARK.value,
    help="Kind of mover that hands off near-due messages.",
)
final_window = click.option(
    "--final-window",
    type=OneOf(FinalWindow),
    default=FinalWindow.TRACKER.value,
    help="Component that holds messages between their last hand-off and their due time.",
)
level_topic = click.option(
    "--level-topic", metavar="NAME", help="Name of the level topic; by default _TOPIC-delay-level."
)
level_namespace = click.option(
    "--level-namespace",
    metavar="TENANT/NAMESPACE",
    help="Namespace of the level topic; that of the business topic by default.",
)
# The following need further attributes, such as a default.
max_delay = functools.partial(
    click.option,
    "--max-delay",
    "maximum_delay",
    type=DURATION,
    help="Longest delay.",
)
at = functools.partial(click.option, "--at", type=TIME, help="Due time: ISO-8601, epoch ms or +2h.")
attribute = functools.partial(
    click.option,
    "--attribute",
    metavar="ATTRIBUTE",
    help="Attribute of pending messages for live queries: size, delay, or a numeric property.",
)
on_missing_target = functools.partial(
    click.option,
    "--on-missing-target",
    type=OneOf(MissingTarget),
    help="Action for messages whose business topic does not exist.",
)
expire_after = functools.partial(
    click.option,
    "--expire-after",
    "expire_after_ms",
    type=DURATION_MS,
    help="Longest time from due time to release of messages without their own expiry; 0s for any.",
)
expired = functools.partial(
    click.option,
    "--expired",
    type=OneOf(Expired),
    help="Action for messages that would be released after their expiry.",
)
keep_target = click.option(
    "--keep-target",
    is_flag=True,
    help="Publish to the business topic also while it has no subscription; create and keep it.",
)


def dispatching(function: Function) -> Function:
    """Add the options of a dispatcher; ``dispatch_settings`` takes their values."""
    for decorate in (
        click.option(
            "--dispatcher-name",
            "name",
            metavar="NAME",
            help="Name of this dispatcher; by default host and process.",
        ),
        spill_dir,
        click.option(
            "--checkpoint-interval",
            "checkpoint_ms",
            type=DURATION_MS,
            default="1s",
            help="Interval between acknowledgements of released messages.",
        ),
        click.option(
            "--remember",
            type=click.IntRange(min=2),
            default=2_000_000,
            metavar="IDS",
            help="Number of message IDs to remember for each source, to drop copies.",
        ),
        click.option(
            "--memory",
            type=click.IntRange(min=8),
            default=256,
            metavar="MIB",
            help="Memory for pending payloads of each level topic; the rest is spilled to disk.",
        ),
        delivery,
    ):
        function = decorate(function)
    return function


def metrics(function: Function) -> Function:
    """Add ``--metrics-port`` and ``--metrics-address``."""
    port = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Port for metrics, probes and the status page; 0 for any free port.",
    )
    address = click.option(
        "--metrics-address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Address of the interface that serves them.",
    )
    return port(address(function))


def log(function: Function) -> Function:
    """Add ``-n/--lines`` and ``-f/--follow``."""
    lines = click.option(
        "-n", "--lines", type=click.IntRange(min=0), default=100, help="Number of lines to show."
    )
    follow = click.option("-f", "--follow", is_flag=True, help="Print new lines until Ctrl-C.")
    return lines(follow(function))


def _check_namespace(ctx: click.Context, param: click.Parameter, value: str) -> str:
    parse_namespace(value)
    return value


namespace = click.argument("namespace", default="public/default", callback=_check_namespace)
