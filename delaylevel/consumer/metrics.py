"""Metrics and probes of an application's listeners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from delaylevel.web.reports import ProbeCheck, ProblemLine, Reporter, StatusSection

from .listener import BOUNDS_S, Listener, ListenerHealth

_LABELS = ("topic", "subscription", "listener")
_COUNTERS = (
    ("received", "Messages and retried copies that were received."),
    ("handled", "Attempts that succeeded."),
    ("failed", "Attempts that failed."),
    ("retried", "Copies that were stored for another attempt."),
    ("dead", "Messages that were moved to the dead-letter topic."),
    ("filtered", "Messages that the filter left out."),
    ("duplicates", "Messages that were handled before."),
)


class ReportingApp(Protocol):
    """The part of `Listeners` that metrics and probes are about."""

    @property
    def listeners(self) -> Sequence[Listener]: ...

    def health(self) -> Mapping[tuple[str, str], ListenerHealth]: ...


class ListenerCollector(Reporter):
    """Metrics of an application's listeners, read at each scrape, with probes and status page.

    Register it with ``prometheus_client.REGISTRY.register(…)`` if the application has metrics of
    its own, or pass it to :func:`delaylevel.metrics.serve`.

    Args:
        app: the listeners.
    """

    def __init__(self, app: ReportingApp) -> None:
        self._app = app

    def collect(self) -> Iterator[Any]:
        """Yield every metric family."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        def family(kind: Any, name: str, text: str) -> Any:
            return kind(f"delaylevel_listener_{name}", text, labels=_LABELS)

        found = [
            ((each.topic, each.subscription, each.name), each.stats.counts())
            for each in self._app.listeners
        ]
        for name, text in _COUNTERS:
            counter = family(CounterMetricFamily, name, text)
            for labels, counts in found:
                counter.add_metric(labels, getattr(counts, name))
            yield counter
        progress = family(GaugeMetricFamily, "in_progress", "Messages that a handler has now.")
        text = "Duration of the calls of the handler."
        durations = family(HistogramMetricFamily, "duration_seconds", text)
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        for labels, counts in found:
            progress.add_metric(labels, counts.in_progress)
            buckets = list(zip(bounds, accumulate(counts.durations), strict=True))
            durations.add_metric(labels, buckets, counts.duration_s)
        yield from (progress, durations)
        text = "1 while all consumers of the listener are open and connected."
        subscribed = family(GaugeMetricFamily, "subscribed", text)
        for listener, state in self._states():
            labels = (listener.topic, listener.subscription, listener.name)
            subscribed.add_metric(labels, int(state.subscribed))
        yield subscribed

    def alive(self) -> Sequence[ProbeCheck]:
        return [
            ProbeCheck(
                f"threads of {listener}",
                state.alive,
                "they run"
                if state.alive
                else "a thread ended: the log of this process has the reason; restart it",
            )
            for listener, state in self._states()
        ]

    def ready(self) -> Sequence[ProbeCheck]:
        return [_subscribed(listener, state) for listener, state in self._states()]

    def status(self) -> Sequence[StatusSection]:
        return [_section(listener, state) for listener, state in self._states()]

    def _states(self) -> list[tuple[Listener, ListenerHealth]]:
        health, idle = self._app.health(), ListenerHealth(alive=True, subscribed=False)
        return [
            (each, health.get((each.topic, each.subscription), idle))
            for each in self._app.listeners
        ]


def _subscribed(listener: Listener, state: ListenerHealth) -> ProbeCheck:
    text = "subscribed"
    if not state.subscribed:
        text = "not subscribed: it has not started or has stopped, or the log has the reason"
    return ProbeCheck(f"consumers of {listener}", state.subscribed, text)


def _section(listener: Listener, state: ListenerHealth) -> StatusSection:
    counts = listener.stats.counts()
    facts = {
        "Topic": listener.topic,
        "Subscription": f"{listener.subscription} ({listener.subscription_type.name})",
        "In progress": f"{counts.in_progress:,}",
        **{name.capitalize(): f"{getattr(counts, name):,}" for name, _ in _COUNTERS},
    }
    calls = sum(counts.durations)
    if calls:
        facts["Mean duration"] = f"{counts.duration_s / calls * 1000:,.1f} ms"
    check = _subscribed(listener, state)
    problems = () if check.ok else (ProblemLine(check.name, check.text),)
    return StatusSection(title=listener.name, facts=facts, problems=problems)
