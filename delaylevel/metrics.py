"""Metrics for Prometheus: those of an application's producers, and a way to serve them."""

from delaylevel.producer.metrics import CountingProducer, ProducerCollector
from delaylevel.prometheus import Collector, serve

__all__ = ["Collector", "CountingProducer", "ProducerCollector", "serve"]
