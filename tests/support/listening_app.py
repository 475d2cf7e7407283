"""An application with one listener, which tests run as a process of its own, and kill.

``delaylevel listen support.listening_app:app`` runs it, with the plan in the environment.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

from delaylevel.consumer import (
    Backoff,
    Deduplication,
    Listeners,
    ReceivedMessage,
    Reject,
    Retry,
    TopicIdStore,
)
from support.listening_plan import LATER_MS, AuditFile, Fate, Plan

plan = Plan.of_environment()
audit = AuditFile(plan.audit)
app = Listeners.from_config()

options: dict[str, Any] = {}
if plan.deduplicate:
    options["deduplicate"] = Deduplication(store=TopicIdStore())


def begin(message: ReceivedMessage) -> tuple[int, float]:
    """Note the begin of an attempt; return the number of the message, and the time to work."""
    number = int(message.value)
    audit.append("begin", number, message)
    return number, plan.chance(number, message.attempt).random() * plan.work_ms / 1000


def end(message: ReceivedMessage, number: int) -> None:
    """End an attempt as it is planned."""
    fate = plan.fate(number, message.attempt)
    audit.append(fate.value, number, message)
    if fate is Fate.FAILED:
        raise ValueError(f"number {number} failed")
    if fate is Fate.LATER:
        raise Retry(after=timedelta(milliseconds=LATER_MS), reason=f"number {number} later")
    if fate is Fate.REJECTED:
        raise Reject(f"number {number} rejected")


def handle(message: ReceivedMessage) -> None:
    number, seconds = begin(message)
    time.sleep(seconds)
    end(message, number)


async def handle_async(message: ReceivedMessage) -> None:
    number, seconds = begin(message)
    await asyncio.sleep(seconds)
    end(message, number)


app.on(
    plan.topic,
    subscription=plan.subscription,
    subscription_type=plan.subscription_type,
    retry=Backoff(*(timedelta(milliseconds=delay) for delay in plan.delays_ms)),
    concurrency=plan.concurrency,
    initial_position="earliest",
    name="handler",
    **options,
)(handle_async if plan.is_coroutine else handle)

if __name__ == "__main__":
    app.run()
