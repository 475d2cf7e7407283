"""Tests of the order in which the addresses of the admin interface are tried."""

from __future__ import annotations

import pytest

from delaylevel.cluster.rest.http import AdminAddresses, addresses_of, base_of, host_of
from delaylevel.errors import ConfigError

A, B, C = "http://a:8080", "http://b:8080", "http://c:8080"


class Time:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_given_order_counts_until_one_answers() -> None:
    now = Time()
    addresses = AdminAddresses([A, B, C], now)
    assert addresses.in_order() == [A, B, C]
    addresses.failed(A, hangs=False)
    assert addresses.in_order() == [B, C, A]
    addresses.answered(B)
    assert addresses.in_order() == [B, C, A]
    addresses.failed(B, hangs=False)
    assert addresses.in_order() == [C, B, A]
    addresses.failed(C, hangs=False)
    now.now_s = 1.0
    addresses.answered(A)
    assert addresses.in_order() == [A, B, C]


def test_brokers_that_were_learned_come_after_the_given_ones() -> None:
    now = Time()
    addresses = AdminAddresses([A], now)
    addresses.redirected(B)
    addresses.redirected(A)
    assert addresses.in_order() == [A, B]
    addresses.answered(A)
    assert addresses.in_order() == [A, B]
    addresses.failed(A, hangs=True)
    assert addresses.in_order() == [B, A]
    addresses.answered(B)
    assert addresses.in_order() == [B, A]


def test_a_learned_broker_is_forgotten_unless_it_answers() -> None:
    now = Time()
    addresses = AdminAddresses([A], now)
    addresses.learn(B)
    addresses.learn(C)
    now.now_s = 500.0
    addresses.answered(C)
    now.now_s = 700.0
    assert addresses.in_order() == [C, A]
    now.now_s = 1_200.0
    assert addresses.in_order() == [A]


def test_few_of_many_brokers_are_tried() -> None:
    addresses = AdminAddresses([A], Time())
    for number in range(50):
        addresses.learn(f"http://broker-{number}:8080")
    assert addresses.in_order() == [
        A,
        *(f"http://broker-{number}:8080" for number in range(42, 50)),
    ]


def test_the_list_of_brokers_is_due_after_a_while_and_then_now_and_again() -> None:
    now = Time()
    addresses = AdminAddresses([A], now)
    assert not addresses.is_list_due()
    now.now_s = 6.0
    assert addresses.is_list_due()
    assert not addresses.is_list_due()
    now.now_s = 400.0
    assert addresses.is_list_due()


def test_an_admin_url_names_addresses_that_a_process_shares() -> None:
    addresses = addresses_of("http://shared-a:8080, shared-b:8080/")
    assert addresses.in_order() == ["http://shared-a:8080", "http://shared-b:8080"]
    assert addresses_of("http://shared-a:8080, shared-b:8080/") is addresses
    for wrong in ("shared:8080", "ftp://shared", "http://", "http://me@shared"):
        with pytest.raises(ConfigError):
            addresses_of(wrong)
    assert base_of("https://h:1/admin/v2?x=1") == "https://h:1"
    assert host_of("https://h:1/admin/v2?x=1") == "h:1"


def test_an_address_that_timed_out_is_probed_now_and_then() -> None:
    now = Time()
    addresses = AdminAddresses([A], now)
    addresses.failed(A, hangs=False)
    assert not addresses.needs_probe(A), "a refusal costs no time"
    addresses.failed(A, hangs=True)
    assert addresses.needs_probe(A)
    assert addresses.take_probe(A)
    assert not addresses.take_probe(A)
    addresses.failed(A, hangs=True)
    assert not addresses.take_probe(A)
    now.now_s = 2.5
    assert addresses.take_probe(A)
    addresses.answered(A)
    assert not addresses.needs_probe(A)


def test_a_slow_address_is_known_as_slow_until_it_hangs() -> None:
    now = Time()
    addresses = AdminAddresses([A], now)
    assert not addresses.is_slow(A)
    addresses.slow(A)
    assert addresses.is_slow(A)
    now.now_s = 31.0
    assert not addresses.is_slow(A)
    addresses.slow(A)
    addresses.failed(A, hangs=True)
    assert not addresses.is_slow(A)
