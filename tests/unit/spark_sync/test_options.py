"""Tests of the options of the Spark source and sink."""

from __future__ import annotations

import pytest

from delaylevel.config import Connection
from delaylevel.errors import ConfigError
from delaylevel.spark_sync.options import SyncOptions


@pytest.mark.parametrize(
    ("given", "verified"),
    [
        ({}, True),
        ({"tlsValidateHostname": "true"}, True),
        ({"tlsvalidatehostname": "false"}, False),
    ],
)
def test_host_names_are_verified_unless_told_otherwise(
    given: dict[str, str], verified: bool
) -> None:
    parsed = SyncOptions.parse({"levelTopics": "orders-delay-level", **given})
    connection = Connection.load(**dict(parsed.connection), environ={})
    assert connection.tls_validate_hostname is verified


def test_the_start_of_a_query_is_that_of_the_subscription() -> None:
    given = {"levelTopics": "orders-delay-level", "startingOffsets": "earliest"}
    with pytest.raises(ConfigError, match="reset-cursor"):
        SyncOptions.parse(given)
