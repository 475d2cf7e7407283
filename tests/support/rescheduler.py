"""An application that schedules messages and replaces them, until it is killed.

It is a process of its own, and appends a line of JSON to a file after each step.

Args:
    service URL, admin URL, business topic, level topic, file, first number, last number, seed
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from delaylevel import DelayLevelClient
from delaylevel.producer.scheduling import Scheduling


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    service_url, admin_url, topic, level_topic, path, *numbers = arguments
    first, last, seed = map(int, numbers)
    client = DelayLevelClient(service_url, admin_url=admin_url)
    producer: Any = client.create_producer(
        topic, enable_delay_level_topic=True, delay_level_topic=level_topic
    )
    cancel = Scheduling._cancel
    with open(path, "a", buffering=1) as log:

        def note(**fields: Any) -> None:
            log.write(json.dumps(fields) + "\n")

        for number in range(first, last):
            chosen = random.Random(seed + number)
            note(begun=number)
            delay = timedelta(milliseconds=chosen.randint(300, 6_000))
            old = producer.schedule(b"old", deliver_after=delay, message_id=f"old-{number}")
            note(stored=number)
            time.sleep(chosen.choice([0, 0.02, 0.1]))
            # One in six ends between the two steps.
            Scheduling._cancel = die if number % 6 == 5 else cancel  # type: ignore[method-assign]
            content = f"new-{number}".encode()
            timeout = chosen.choice([None, 0.5])
            if chosen.random() < 0.5:
                found = producer.fire_now(old, content, timeout=timeout)
            else:
                again = timedelta(milliseconds=chosen.randint(100, 6_000))
                found = producer.reschedule(old, content, deliver_after=again, timeout=timeout)
            note(replaced=number, status=str(found.outcome.status))
    client.close()


if __name__ == "__main__":
    main(sys.argv[1:])
