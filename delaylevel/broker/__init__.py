"""A private real Pulsar broker for first steps and tests; Docker is not needed."""

from delaylevel.cluster.connection.local_brokers import BrokerStatus

from .distribution import PULSAR_VERSION, distribution_directory, fetch
from .embedded import EmbeddedBroker

__all__ = ["PULSAR_VERSION", "BrokerStatus", "EmbeddedBroker", "distribution_directory", "fetch"]
