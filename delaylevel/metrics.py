"""Metrics for Prometheus: the collector for an application's producers, and a way to serve it."""

from delaylevel.producer.metrics import ProducerCollector
from delaylevel.prometheus import Collector, serve

__all__ = ["Collector", "ProducerCollector", "serve"]
