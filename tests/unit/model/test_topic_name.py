"""Tests of topic names: parsing, refused names, and derived names."""

from __future__ import annotations

from delaylevel.model.topic_name import TopicName


def test_names_of_partitions() -> None:
    name = TopicName.parse("orders")
    assert name.partition_index is None
    assert name.without_partition == name
    third = name.partition(3)
    assert third.local == "orders-partition-3"
    assert third.partition_index == 3
    assert third.without_partition == name
    # These names only look like those of partitions.
    for local in ("orders-partition-x", "orders-partition-", "-partition-3", "partition-3"):
        assert TopicName.parse(local).partition_index is None
    twice = third.partition(0)
    assert twice.partition_index == 0
    assert twice.without_partition == third


def test_names_have_paths_and_suffixes() -> None:
    name = TopicName.parse("shop/eu/a b%?")
    assert name.namespace_path == "shop/eu"
    assert name.rest_path == "persistent/shop/eu/a%20b%25%3F"
    assert name.with_suffix("-held").full == "persistent://shop/eu/a b%?-held"
    assert sorted([TopicName("b", "a", "a"), TopicName("a", "b", "b")])[0].tenant == "a"
