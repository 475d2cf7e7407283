"""Full topic names, their parts, and the names that are derived from them."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from urllib.parse import quote

from delaylevel.errors import InvalidInputError

# Categories of Unicode: control characters, lone surrogates, separators of lines and paragraphs.
_UNUSABLE = ("Cc", "Cs", "Zl", "Zp")
_PARTITION = re.compile(r"^(?P<base>.+)-partition-(?P<index>\d+)$")


@dataclass(frozen=True, order=True)
class TopicName:
    """A persistent topic: ``persistent://tenant/namespace/local``."""

    tenant: str
    namespace: str
    local: str

    @classmethod
    def parse(cls, topic: str) -> TopicName:
        """Parse ``orders`` (in ``public/default``), ``tenant/ns/orders`` or a full topic name."""
        scheme, separator, rest = topic.partition("://")
        if not separator:
            rest = topic
        elif scheme != "persistent":
            raise InvalidInputError(
                f"topic {topic!r}: only persistent topics keep delayed messages; "
                "name it persistent://tenant/namespace/topic"
            )
        parts = rest.split("/")
        if len(parts) == 1 and not separator:
            parts = ["public", "default", *parts]
        if len(parts) != 3 or not all(parts):
            raise InvalidInputError(
                f"topic {topic!r} is not a topic name: "
                "give topic, tenant/namespace/topic or persistent://tenant/namespace/topic"
            )
        return cls(*parts)

    @property
    def full(self) -> str:
        """``persistent://tenant/namespace/local``."""
        return f"persistent://{self.tenant}/{self.namespace}/{self.local}"

    @property
    def short(self) -> str:
        """The shortest text that names the topic: ``orders`` or ``tenant/namespace/orders``."""
        namespace = self.namespace_path
        return self.local if namespace == "public/default" else f"{namespace}/{self.local}"

    @property
    def namespace_path(self) -> str:
        """``tenant/namespace``."""
        return f"{self.tenant}/{self.namespace}"

    @property
    def rest_path(self) -> str:
        """The path of the topic in the admin REST interface, each part percent-encoded."""
        local = quote(self.local, safe="")
        return f"persistent/{quote(self.tenant)}/{quote(self.namespace)}/{local}"

    def subscription_path(self, subscription: str) -> str:
        """Return the path of a subscription in the admin REST interface."""
        name = quote(subscription, safe="")
        if "%" in subscription or "+" in subscription:
            name = quote(name, safe="")  # the broker decodes it twice
        return f"{self.rest_path}/subscription/{name}"

    @property
    def unusable(self) -> str:
        """The reason why clients or the admin interface cannot use this name; empty if they can."""
        if self.local in (".", ".."):
            return "the admin interface takes it for a part of a path"
        # The C++ client and the broker disagree about these, or refuse them.
        if any(unicodedata.category(letter) in _UNUSABLE for letter in self.local):
            return "it contains control characters, or characters that are not Unicode text"
        return ""

    @property
    def partition_index(self) -> int | None:
        """The index in the name of a partition; None for other topics."""
        match = _PARTITION.match(self.local)
        return int(match["index"]) if match else None

    @property
    def without_partition(self) -> TopicName:
        """The partitioned topic that this partition belongs to, or the topic itself."""
        match = _PARTITION.match(self.local)
        return TopicName(self.tenant, self.namespace, match["base"]) if match else self

    def partition(self, index: int) -> TopicName:
        """Return the name of partition ``index`` (from 0)."""
        return TopicName(self.tenant, self.namespace, f"{self.local}-partition-{index}")

    def with_suffix(self, suffix: str) -> TopicName:
        """Return the name of the topic with ``suffix`` appended."""
        return TopicName(self.tenant, self.namespace, self.local + suffix)

    def __str__(self) -> str:
        return self.full


def parse_namespace(namespace: str) -> tuple[str, str]:
    """Return tenant and namespace of ``tenant/namespace``."""
    parts = namespace.split("/")
    if len(parts) != 2 or not all(parts):
        raise InvalidInputError(f"{namespace!r} is not a namespace: write tenant/namespace")
    return parts[0], parts[1]
