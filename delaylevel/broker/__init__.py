"""A private, real Pulsar broker for first steps and tests, without Docker."""

from .embedded import BrokerStatus, EmbeddedBroker, instances, running_instance

__all__ = ["BrokerStatus", "EmbeddedBroker", "instances", "running_instance"]
