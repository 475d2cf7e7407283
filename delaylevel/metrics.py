"""Metrics for Prometheus: the collector for an application's producers, and a way to serve it."""

from delaylevel.producer.metrics import ProducerCollector
from delaylevel.producer.scheduling import BaseProducer as CountingProducer
from delaylevel.prometheus import Collector, serve

__all__ = ["Collector", "CountingProducer", "ProducerCollector", "serve"]
