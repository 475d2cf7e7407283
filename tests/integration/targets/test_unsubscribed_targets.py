"""Tests of business topics that nobody subscribes to, on a real broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import Result

from delaylevel.topics.targets import unsubscribed
from support.world import RealWorld


def test_commands_explain_a_target_without_subscription_and_keep_it(
    world: RealWorld, invoke: Callable[..., Result]
) -> None:
    orders, name = world.name("orders").short, world.name("orders")
    remedy = f"`delaylevel levels set {orders} --keep-target`"
    created = invoke("levels", "create", orders)
    assert f"{orders} does not exist" in created.stderr
    assert remedy in created.stderr
    sent = invoke("send", orders, "hi", "--after", "2d")
    assert f"{orders} has no subscription and no known retention" in sent.stderr
    assert remedy in sent.stderr
    world.admin.delete(name, force=True)  # as the broker does after a minute
    failed = invoke("doctor", orders)
    assert f"{orders} does not exist" in failed.output
    assert remedy in failed.output

    assert invoke("levels", "set", orders, "--keep-target").exit_code == 0
    assert world.admin.topic_policies(name).delete_while_inactive is False
    assert unsubscribed(world.admin, name) is None
    assert "subscription" not in invoke("send", orders, "hi", "--after", "2d").stderr


def test_target_is_kept_from_the_start(world: RealWorld, invoke: Callable[..., Result]) -> None:
    bills, extra = world.name("bills"), world.name("extra")
    created = invoke(
        "levels", "create", bills.short, "--target", extra.full, "--keep-target", "-o", "json"
    )
    assert created.exit_code == 0, created.output
    assert "subscription" not in created.stderr
    for name in (bills, extra):
        assert world.admin.topic_policies(name).delete_while_inactive is False
        assert world.admin.partitioned_metadata(name).partitions == 0


@pytest.mark.parametrize("of", ["topic", "namespace"])
def test_a_retention_receives_what_is_published(world: RealWorld, of: str) -> None:
    name = world.name("orders")
    world.plain_client.create_producer(name.full).close()
    assert unsubscribed(world.admin, name) is not None
    path = name.rest_path if of == "topic" else f"namespaces/{name.namespace_path}"
    policy = {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1}
    world.rest.post(f"{path}/retention", policy)
    world.eventually(lambda: world.admin.retains(name), "the retention")
    assert unsubscribed(world.admin, name) is None
    world.rest.post(f"{path}/retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    world.eventually(lambda: not world.admin.retains(name), "the end of the retention")
