"""Metrics for Prometheus: the collector for an application's producers, and a way to serve it."""

from delaylevel.producer.base import BaseProducer as CountingProducer
from delaylevel.producer.metrics import ProducerCollector
from delaylevel.prometheus import Collector, serve

__all__ = ["Collector", "CountingProducer", "ProducerCollector", "serve"]
