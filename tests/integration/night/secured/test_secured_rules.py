"""Tests of a namespace where a subscription must begin with the role of its consumer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.doctor import State, examine
from delaylevel.errors import UnsafeNamespaceError
from support.background import serving_movers
from support.world import QUIET, eventually

pytestmark = pytest.mark.broker

MODE = "namespaces/public/default/subscriptionAuthMode"


def refused(roles: Any) -> set[str]:
    """Return the kinds of what the mover's role may not open of the levels."""
    found = {item.check: item for item in examine(roles.load("mover"), roles.description.topic)}
    says = [each.says for each in found["openings"].warnings]
    return {line.split()[6] for line in says if "-delay-level-partition" in line}


def test_a_prefix_of_subscriptions_is_refused_reported_and_survived(roles: Any) -> None:
    description = roles.description
    with roles.client("sender") as client:
        producer = client.create_producer(roles.target, enable_delay_level_topic=True)
        producer.send(b"x", deliver_after=timedelta(seconds=2))
    with roles.owner() as owner, closing(roles.load("mover").open_client(logger=QUIET)) as client:
        owner._rest.post(MODE, "Prefix")
        another = replace(description, topic=f"{description.topic}-more")
        with pytest.raises(UnsafeNamespaceError, match="set-subscription-auth-mode"):
            topics.create(owner, another)
        assert not owner.topic_exists(another.name)
        with serving_movers(client, roles.admin("mover"), description.topic) as movers:

            def stats() -> Any:
                return movers.stats()[description.topic]

            eventually(lambda: stats().state == "failing", "the refusal")
            assert "AuthorizationError" in stats().problem
            assert f"`delaylevel doctor {description.topic}`" in stats().problem
            token = roles.secured.load(token=roles.secured.token)
            found = {item.check: item for item in examine(token, description.topic)}
            assert found["subscription prefix"].state is State.FAILED
            # The mover's role may not read the rules, but it sees what they forbid.
            assert refused(roles) >= {"consumer", "reader"}
            owner._rest.post(MODE, "None")
            eventually(lambda: stats().counts["window"] == 1, "the hand-off")
            assert "consumer" not in refused(roles), "what docs/security.md grants is enough"
