"""Addresses of a cluster's admin interface, in the order in which a request tries them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from delaylevel.errors import ConfigError

# A broker's address may belong to another program later: those that nobody has named for this time
# are forgotten.
_KEEP_S = 600.0
# The limit of brokers that are tried when no given address answers.
_MOST_LEARNED = 8
# The list of brokers is requested after this time, and then once in each period. Short commands end
# before that.
_FIRST_LIST_S, _LIST_EVERY_S = 5.0, 300.0
# An address that timed out is asked for a sign of life at most once in this time.
_PROBE_EVERY_S = 2.0
# An address that was slow, and gave a sign of life, is waited for in this time.
_SLOW_S = 30.0


class AdminAddresses:
    """The addresses of one cluster: those that the user gave, and those of its other brokers.

    The address that answered last comes first, and those that have failed since their last answer
    come at the end. Brokers
    whose addresses are known from redirects, or from the cluster's own list, are tried after the
    given addresses. So an address that does not answer stops nothing while another broker lives.

    Any number of threads may use one instance.

    Args:
        given: base URLs, e.g. ``http://host:8080``; the first one is tried first.
        now_s: the monotonic clock, in seconds.
    """

    def __init__(self, given: Iterable[str], now_s: Callable[[], float] = time.monotonic) -> None:
        self._given = tuple(given)
        self._now_s = now_s
        # Each operation on these is atomic.
        self._learned: dict[str, float] = {}  # time at which the address was named last
        self._answered: dict[str, float] = {}
        self._failed: set[str] = set()
        self._probe_at_s: dict[str, float] = {}  # of those that timed out and have not answered
        self._slow_until_s: dict[str, float] = {}
        self._list_at_s = now_s() + _FIRST_LIST_S
        self.probing = threading.Lock()  # held while an address is asked for a sign of life

    def in_order(self) -> list[str]:
        """Return the base URLs, the first one to try first."""
        oldest_s = self._now_s() - _KEEP_S
        for address, named_s in list(self._learned.items()):
            if max(named_s, self._answered.get(address, named_s)) < oldest_s:
                self._learned.pop(address, None)
        learned = list(self._learned)[-_MOST_LEARNED:]
        return sorted(
            [*self._given, *learned],
            key=lambda each: (each in self._failed, -self._answered.get(each, float("-inf"))),
        )

    def answered(self, address: str) -> None:
        """Note that an address has answered now."""
        self._failed.discard(address)
        self._probe_at_s.pop(address, None)
        self._answered[address] = self._now_s()

    def failed(self, address: str, *, hangs: bool) -> None:
        """Note that an address does not answer.

        Args:
            hangs: True if a request timed out; False if the connection failed at once.
        """
        self._failed.add(address)
        if hangs:
            self._slow_until_s.pop(address, None)
            self._probe_at_s.setdefault(address, 0.0)

    def slow(self, address: str) -> None:
        """Note that an address lives, although a request had no answer soon."""
        self._slow_until_s[address] = self._now_s() + _SLOW_S

    def is_slow(self, address: str) -> bool:
        """Return True if an address was slow lately, and has not hung since."""
        return self._now_s() < self._slow_until_s.get(address, 0.0)

    def needs_probe(self, address: str) -> bool:
        """Return True if a request to an address timed out, and it has not answered since."""
        return address in self._probe_at_s

    def take_probe(self, address: str) -> bool:
        """Return True if it is time to ask an address for a sign of life; once in each period."""
        now_s = self._now_s()
        if now_s < self._probe_at_s.get(address, 0.0):
            return False
        self._probe_at_s[address] = now_s + _PROBE_EVERY_S
        return True

    def redirected(self, address: str) -> None:
        """Note that an address has answered to which another one redirects."""
        self._failed.discard(address)
        self._probe_at_s.pop(address, None)
        self.learn(address)

    def learn(self, address: str) -> None:
        """Note the base URL of a broker of the cluster."""
        if address not in self._given:
            self._learned.pop(address, None)  # the latest ones are at the end
            self._learned[address] = self._now_s()

    def is_list_due(self) -> bool:
        """Return True if it is time to request the list of brokers; once in each period."""
        now_s = self._now_s()
        if now_s < self._list_at_s:
            return False
        self._list_at_s = now_s + _LIST_EVERY_S
        return True


# All clients of a process that have the same addresses share what they know.
_shared: dict[str, AdminAddresses] = {}


def addresses_of(admin_url: str) -> AdminAddresses:
    """Return the addresses that an ``admin_url`` names; always the same instance.

    Args:
        admin_url: ``http://host:port``, with further hosts after commas.

    Raises:
        ConfigError: it names no address.
    """
    scheme, separator, rest = admin_url.partition("://")
    hosts = [host.strip().rstrip("/") for host in rest.split(",") if host.strip("/ ")]
    if not separator or scheme not in ("http", "https") or not hosts:
        raise ConfigError(f"admin_url {admin_url!r} must look like http://host:port")
    if "@" in rest:
        raise ConfigError("admin_url must not carry a user or password: use a token")
    given = AdminAddresses(f"{scheme}://{host}" for host in hosts)
    return _shared.setdefault(admin_url, given)


def base_of(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def host_of(url: str) -> str:
    """Return host and port of a URL."""
    return urlsplit(url).netloc
