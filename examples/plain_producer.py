"""A producer of delayed bytes, from docs/wire.md, that needs only the Pulsar client."""

import contextlib
import json
import threading
import time
import urllib.request
import zlib
from typing import Any
from urllib.parse import quote


class WireError(Exception):
    """A refusal. Its arguments are the reason, as docs/wire.md names it, and an explanation."""


def full_name(topic: str) -> str:
    scheme, separator, rest = topic.rpartition("://")
    parts = rest.split("/") if separator or "/" in rest else ["public", "default", rest]
    if len(parts) != 3 or not all(parts) or scheme not in ("", "persistent"):
        raise WireError("invalid-input", f"{topic!r} is not the name of a persistent topic")
    return "persistent://" + "/".join(parts)


def check(due_ms: int, expires_ms: int | None, now_ms: int, message_id: str | None) -> None:
    latest_ms = 253_402_300_799_999
    if due_ms and not 100_000_000_000 <= due_ms <= latest_ms:
        raise WireError("invalid-delay", f"{due_ms} is no time in ms since the epoch")
    if expires_ms is not None and not (due_ms and max(due_ms, now_ms) < expires_ms <= latest_ms):
        raise WireError("invalid-delay", f"{expires_ms} is not after the due time and now")
    if message_id is not None and not 0 < len(message_id) <= 512:
        raise WireError("invalid-input", "a message ID has 1 to 512 characters")


def properties_of(application: dict[str, str], **ours: object) -> dict[str, str]:
    own = {f"delaylevel.{name}": str(value) for name, value in ours.items() if value is not None}
    return {k: v for k, v in application.items() if not k.startswith("delaylevel.")} | own


def read(admin_url: str, level_topic: str) -> "LevelTopic":
    url = f"{admin_url}/admin/v2/{quote(level_topic.replace('://', '/'))}/partitions"
    try:
        with urllib.request.urlopen(f"{url}?checkAllowAutoCreation=false", timeout=30) as answer:
            return LevelTopic(json.load(answer).get("properties") or {})
    except (OSError, ValueError, AttributeError) as error:
        missing = getattr(error, "code", None) == 404
        raise WireError("level-topic" if missing else "admin", f"{url}: {error}") from error


class LevelTopic:  # its description, from its properties
    def __init__(self, properties: dict[str, str]) -> None:
        try:
            value = json.loads(properties["delaylevel.description"])
            if type(version := value["version"]) is not int or version != 1:
                newer = type(version) is int and version > 1
                raise WireError("upgrade-required" if newer else "level-topic", str(version))
            recirculates = ("reject", "recirculate").index(value["overflow"]) == 1
            self.by_function = ("service", "function").index(value["mover"]) == 1
            self.tracker = ("broker", "tracker").index(value["final_window"]) == 1
            self.levels, self.topics = value["levels"], value["topics"]
            self.shape = {"overflow": value["overflow"], "levels": self.levels}
            self.windows, self.reserve = value["window_partitions"], value["reserve"]
            added = (name.partition("delaylevel.target.")[2] for name in properties)
            self.targets = {*value["targets"], *added}
            self.longest_ms = float("inf") if recirculates else self.levels[0]["maximum_ms"]
            self.former = value.get("former", [])
        except (KeyError, TypeError, ValueError) as error:
            text = f"no level topic, or damaged ({error!r}): run `delaylevel levels create`"
            raise WireError("level-topic", text) from error

    def extends(self, known: "LevelTopic") -> bool:
        return known.shape in self.former and known.by_function == self.by_function

    def largest(self, max_message_size: int) -> int:
        return int(max_message_size - max_message_size // 255 - self.reserve)

    def route(self, due_ms: int, now_ms: int, key_or_id: str | None) -> tuple[str, int | None]:
        """Return the partition of a record, empty for the business topic, and deliver_at."""
        remaining = due_ms - now_ms
        if remaining > self.longest_ms:
            raise WireError("delay-too-long", f"{remaining} ms: expand the level topic")
        for level in self.levels:
            if remaining >= (unit := level["unit_ms"]):
                number = min(remaining // unit - 1, level["partitions"] - 1)
                hand_off_ms = now_ms + (number + 1) * unit - level["lead_ms"]
                partition = f"{level['topic']}-partition-{number}"
                return partition, hand_off_ms if self.by_function else None
        if not self.tracker:
            return "", due_ms
        number = zlib.crc32(key_or_id.encode()) if key_or_id else now_ms // 1000
        return f"{self.topics['window']}-partition-{number % self.windows}", None


class PlainProducer:
    """A producer for one business topic, with a pulsar.Client; each call waits for its end."""

    def __init__(self, client: Any, admin_url: str, topic: str, level_topic: str) -> None:
        self._client, self._target, self._producers = client, full_name(topic), {}
        self._place = admin_url, full_name(level_topic)
        self._found, self._read_s = read(*self._place), time.monotonic()
        if self._target not in self._found.targets:
            raise WireError("target-not-allowed", f"{level_topic} is not for {topic}")

    def send(self, body: bytes, due_ms: int = 0, key: str | None = None, **more: Any) -> None:
        """Store a message; more: message_id, properties, expires (ms since the epoch), replaces."""
        own_id, application = more.pop("message_id", None), more.pop("properties", {})
        check(due_ms, more.get("expires"), now_ms := time.time_ns() // 1_000_000, own_id)
        found, place, deliver_at = self._current(due_ms - now_ms), "", None
        if due_ms > now_ms or "kind" in more:
            place, deliver_at = found.route(due_ms, now_ms, key or own_id)
        ours = more | {"target": self._target} if place else {"target": own_id and self._target}
        properties = properties_of(application, due=due_ms or None, id=own_id, **ours)
        texts = [(f"{name}{value}", 32) for name, value in application.items()] + [(key or "", 16)]
        size = len(body) + sum(len(text.encode()) + added for text, added in texts if text)
        if place and size > (limit := found.largest(5_242_880)):
            raise WireError("message-too-large", f"{size} bytes, and {limit} can be parked")
        producer = self._producer(place or self._target)
        producer.send(body, properties, partition_key=key, deliver_at=deliver_at)

    def cancel(self, message_id: str, due_ms: int, key: str | None = None) -> None:
        """Ask the dispatcher not to release the message with this ID, due time and key."""
        if not self._found.tracker:
            raise WireError("level-topic", "its final window is that of the broker")
        self.send(b"cancel", due_ms, key, message_id=message_id, kind="cancel")

    def _current(self, remaining_ms: int) -> LevelTopic:
        age_s = time.monotonic() - self._read_s
        if age_s > 60:
            threading.Thread(target=self._read_again, daemon=True).start()
        elif age_s > 1 and remaining_ms > self._found.longest_ms:
            self._read_again()
        return self._found

    def _read_again(self) -> None:
        self._read_s = time.monotonic()
        with contextlib.suppress(WireError):  # it goes on with what it knows
            if (found := read(*self._place)).extends(self._found):
                self._found = found

    def _producer(self, topic: str) -> Any:
        if topic not in self._producers:
            try:
                read(*self._place)  # a producer would create a partition that was deleted
            except WireError as error:
                if error.args[0] == "level-topic":
                    raise
            lead_ms = min(level["lead_ms"] for level in self._found.levels)
            patience = {"send_timeout_millis": min(max(lead_ms, 5000), 30_000)}
            self._producers[topic] = self._client.create_producer(topic, **patience)
        return self._producers[topic]
