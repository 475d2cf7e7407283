"""Fixtures for tests on a cluster of two brokers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import PrerequisiteError
from support.cluster import Cluster
from support.world import RealWorld


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with Cluster(tmp_path_factory.mktemp("cluster")) as shared:
            yield shared
    except PrerequisiteError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def cluster(_shared: Cluster) -> Iterator[Cluster]:
    """The cluster that the tests share; at the end, everything runs again."""
    try:
        yield _shared
    finally:
        _shared.recover()


@pytest.fixture
def connection(cluster: Cluster) -> Connection:
    """The addresses of both brokers."""
    return cluster.connection


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    """A new namespace, all of whose topics are at one broker: the first one."""
    name = f"public/test-{uuid.uuid4().hex[:12]}"
    cluster.create_namespace(name, bundles=1)
    cluster.place(name, cluster.broker_nodes[0])
    return name


@pytest.fixture
def world(connection: Connection, namespace: str) -> Iterator[RealWorld]:
    """The namespace, its clients and its admin interface."""
    with ExitStack() as stack:
        yield RealWorld(connection, stack, namespace)
