"""Tests of all series: their names, their list in docs/http.md, the dashboard and the alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from delaylevel.consumer import Listeners
from delaylevel.consumer.handled_ids import SUFFIX as HANDLED
from delaylevel.consumer.metrics import ListenerCollector
from delaylevel.dispatcher.stats import LATENESS_BOUNDS_MS, OwnerStats
from delaylevel.dispatcher.status import DispatchReporter
from delaylevel.functions.mover import metrics_of
from delaylevel.functions.relay import RelayReport
from delaylevel.metrics import ProducerCollector
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import SUBSCRIPTION, Role
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.mover.reporting import MoverReporter
from delaylevel.mover.service import MoverStats
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.roster import RosterReporter
from delaylevel.topics.status import status
from support.fakes import describe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "http.md").read_text("utf-8")
TOPIC = "persistent://public/default/orders-delay-level"
TARGET = "persistent://public/default/orders"
NAME = re.compile(
    r"delaylevel_(producer|listener|dispatch|function|mover|process)_[a-z]+(_[a-z]+)*"
    # base units only
    r"(?<!_ms)(?<!_ms_total)(?<!_ms_max)(?<!_mb)"
)


class Series(NamedTuple):
    """Type and labels of a series; a metric of the Function has no labels."""

    type: str
    labels: frozenset[str] | None


def documented() -> dict[str, Series]:
    """Return the series in the tables of docs/http.md."""
    found: dict[str, Series] = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.match(r"\| `(delaylevel|pulsar)_", line) and len(cells) in (3, 4):
            name = cells[0].strip("`")
            assert name not in found, f"{name} is listed twice"
            labels = frozenset(re.findall(r"`(\w+)`", cells[2])) if len(cells) == 4 else None
            found[name] = Series(cells[1], labels)
    return found


DOCUMENTED = documented()
OURS = {name: each for name, each in DOCUMENTED.items() if name.startswith("delaylevel_")}


def producing(memory: MemoryPulsar) -> Any:
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=PartitionStrategy()
    )


class Dispatching:
    """A fake dispatcher that owns three partitions."""

    groups = ()

    def stats(self) -> dict[tuple[str, int], OwnerStats]:
        return {
            (TOPIC, index): OwnerStats(held={TARGET: 1}, next_due_ms=due_ms)
            for index, due_ms in enumerate((1_000, 9_000, None))
        }


class Moving:
    """A fake service that moves the messages of one level topic."""

    roster = SimpleNamespace(refused={"invoices": "not there"})

    def __init__(self) -> None:
        with MemoryPulsar() as memory:
            producing(memory)
            self.descriptions = memory._broker.level_topics()
            found = {TOPIC: status(memory.admin, self.descriptions[0], memory.clock.now_ms())}
        self.members = SimpleNamespace(read_all=lambda descriptions: found)

    def served(self) -> list[tuple[Any, MoverStats]]:
        stats = MoverStats("standby", counts=ForwardReport(window=3, due=1).counts())
        return [(self.descriptions[0], stats)]


def test_a_waiting_message_is_overdue_only_after_its_time() -> None:
    dispatcher: Any = Dispatching()
    found = DispatchReporter(dispatcher, ManualClock(8_500)).collect()
    (overdue,) = [family for family in found if family.name.endswith("overdue_seconds")]
    assert [sample.value for sample in overdue.samples] == [7.5, 0, 0]


def test_a_producer_counts_messages_by_destination(
    memory_pulsar: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"level_topic": "persistent://public/default/_orders-delay-level", "target": TARGET}
    create = memory_pulsar.client().create_producer
    producer, other = (create("orders", enable_delay_level_topic=True) for _ in range(2))
    registry = CollectorRegistry()
    collector = ProducerCollector(producer)
    registry.register(collector)

    def scraped(way: str) -> float | None:
        name = "delaylevel_producer_messages_total"
        return registry.get_sample_value(name, {**labels, "way": way})

    def connected() -> float | None:
        return registry.get_sample_value("delaylevel_producer_connected", labels)

    assert scraped("DAY") == 0
    producer.send(b"x", deliver_after=timedelta(days=3))
    producer.send_async(b"x", None, deliver_after=timedelta(days=3))
    producer.send(b"x", deliver_after=timedelta(minutes=3))
    producer.send(b"x")
    with pytest.raises(ValueError, match="30d"):
        producer.send(b"x", deliver_after=timedelta(days=31))
    assert [scraped(way) for way in ("DAY", "window", "straight")] == [2, 1, 1]
    assert producer.sent() == {"DAY": 2, "window": 1, "straight": 1}
    other.send(b"x", deliver_after=timedelta(days=1))
    collector.add(other)
    assert scraped("DAY") == 3, "two producers of a topic share a series"
    assert connected() == 1
    other.close()
    assert connected() == 1
    with monkeypatch.context() as patch:
        patch.setattr(producer._business, "is_connected", lambda: False)
        assert connected() == 0
    producer.close()
    assert connected() is None
    assert scraped("DAY") == 3, "closing a producer has changed the count"


def families() -> Iterator[Any]:
    """Yield the metric families of every collector after each kind of event."""
    with MemoryPulsar() as memory:
        producer = producing(memory)
        producer.send(b"x", deliver_after=timedelta(days=3))
        yield from ProducerCollector(producer).collect()
        app = Listeners(memory.client())
        app.on("orders", subscription="billing")(lambda message: None)
        yield from ListenerCollector(app).collect()
    moving: Any = Moving()
    yield from MoverReporter(moving, lambda topic: True).collect()
    dispatching: Any = Dispatching()
    yield from DispatchReporter(dispatching).collect()
    yield from RosterReporter(moving.roster).collect()


def in_code() -> dict[str, Series]:
    found: dict[str, Series] = {}
    for family in families():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert family.samples, f"{name} has no sample"
        assert family.documentation.endswith("."), name
        labels = frozenset(label for sample in family.samples for label in sample.labels)
        assert name not in found, f"{name} is served twice"
        found[name] = Series(family.type, labels - {"le"})
    report = RelayReport(window=3, due=2)
    for name in metrics_of(report, 1):
        found[name] = Series("sum" if name.endswith("_total") else "each second", None)
    return found


def test_the_page_lists_exactly_the_series_that_are_served() -> None:
    assert in_code() == OURS
    assert len(OURS) > 30


def test_names_follow_the_scheme() -> None:
    for name, series in in_code().items():
        assert NAME.fullmatch(name), name
        assert name.endswith("_total") == (series.type in ("counter", "sum")), name


def test_pages_name_only_existing_series() -> None:
    known = {f"{name}{end}" for name in OURS for end in ("", "_bucket", "_sum", "_count")}
    parts = r"\bdelaylevel_(?:producer|dispatch|function|mover|process)_[a-z_]+\b"
    for page in DOCS.glob("*.md"):
        assert set(re.findall(parts, page.read_text(encoding="utf-8"))) <= known, page


yaml = pytest.importorskip("yaml")
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text("utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((DOCS / "alerts.yml").read_text("utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
STRING = r'"(?:[^"\\]|\\.)*"'
SELECTOR = re.compile(
    rf"\b((?:delaylevel|pulsar)_\w+)(?:\{{((?:[^{{}}\"]|{STRING})*)\}})?"  # with its label matchers
)
MATCHER = re.compile(rf"(\w+)\s*(=~|!~|!=|=)\s*({STRING})")


def _selectable() -> dict[str, frozenset[str] | None]:
    """Return the labels of each series that an expression may name."""
    found = {name: each.labels for name, each in DOCUMENTED.items()}
    for name, (kind, labels) in DOCUMENTED.items():
        if kind == "histogram" and labels is not None:
            found |= {f"{name}_bucket": labels | {"le"}}
            found |= {f"{name}_sum": labels, f"{name}_count": labels}
        if name.endswith("metric_sum"):
            found[name.replace("_sum", "_count")] = labels
    return found


SERIES = _selectable()
#: The topics with our subscription, and the role of those of a level topic.
TOPICS: dict[str, Role | None] = {
    member.topic.full: member.role
    for member in describe(topic="persistent://a/b/_orders-delay-level").members()
} | {f"persistent://a/b/orders-billing-{HANDLED}": None}
#: Labels that Prometheus and the broker add to every series.
COMMON_LABELS = {"job", "instance", "namespace", "cluster"}


def expressions() -> list[Any]:
    found = [pytest.param(rule["expr"], id=rule["alert"]) for rule in RULES]
    for panel in PANELS:
        for target in panel["targets"]:
            name = f"{panel['title']}-{target['refId']}"
            found.append(pytest.param(target["expr"], id=name))
    return found


def matchers(text: str) -> Iterator[tuple[str, str, str]]:
    for label, operator, value in MATCHER.findall(text):
        yield label, operator, value[1:-1]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_uses_existing_series_labels_and_values(expression: str) -> None:
    selectors = SELECTOR.findall(re.sub(rf"(?<!=)(?<!=~)(?<!!~){STRING}", '""', expression))
    assert selectors, "no series of delaylevel or Pulsar"
    labels: set[str] = set(COMMON_LABELS)
    for name, inside in selectors:
        assert name in SERIES, f"{name} is not in docs/http.md"
        own = SERIES[name]
        assert own is not None, f"{name} is a value of the label `metric`"
        labels |= own
        for label, operator, value in matchers(inside):
            assert label in own | COMMON_LABELS, f"{name} has no label {label}"
            _check_value(label, operator, value)
    created = set(
        re.findall(rf'label_replace\(.*?, "(\w+)", {STRING}, "\w+"', expression, re.DOTALL)
    )
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels | created, group
    bare = re.sub(STRING, "", expression)
    assert all(bare.count(a) == bare.count(b) for a, b in ("()", "[]", "{}"))


def _check_value(label: str, operator: str, value: str) -> None:
    if label == "metric":
        names = [name for name, labels in SERIES.items() if labels is None]
        pattern = value if operator == "=~" else re.escape(value)
        wanted = len(re.findall(r"\|", value)) + 1 if operator == "=~" else 1
        assert sum(bool(re.fullmatch(pattern, name)) for name in names) == wanted, value
    elif label == "le":
        assert value in {str(bound / 1000) for bound in LATENESS_BOUNDS_MS}
    elif label == "subscription":
        assert value == SUBSCRIPTION
    elif label == "state":
        assert f"`{value}`" in PAGE
    elif label == "became":
        assert value in ForwardReport().counts()
    elif label == "topic":
        topics = {f"{name}-partition-{index}" for name in TOPICS for index in (0, 12)}
        matched = {name for name in topics if re.fullmatch(value, name)}
        assert matched, f"{value} matches no topic of a level topic"
        assert matched != topics
    else:
        assert value == "$level_topic", f"no check for this value of {label}: {value}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_has_a_severity_and_texts(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


# -- the part of PromQL that docs/alerts.yml uses, without the labels of results. A case has series,
# with their values ten minutes ago and now, between which they change steadily. A series is its
# labels, with `__name__`.

Labels = frozenset[tuple[str, str]]
Samples = Mapping[Labels, tuple[float, float]]


def series(name: str, /, **labels: str) -> Labels:
    """Return the labels of a series."""
    return frozenset({"__name__": name, **labels}.items())


class Values(list[Any]):
    """The values of an expression; a comparison drops those that fail it."""

    def __truediv__(self, other: Values) -> Values:
        return Values(mine / theirs for mine, theirs in zip(self, other, strict=True))

    def __rsub__(self, other: float) -> Values:
        return Values(other - each for each in self)

    def __gt__(self, bound: float) -> Values:  # type: ignore[override]
        return Values(each for each in self if each > bound)

    def __eq__(self, bound: object) -> Values:  # type: ignore[override]
        return Values(each for each in self if each == bound)

    def __and__(self, other: Values) -> Values:
        return self if other else Values()

    def __or__(self, other: Values) -> Values:
        return Values([*self, *other])


def _aggregation(of: Callable[[Values], float]) -> Callable[[Values], Values]:
    return lambda values: Values([of(values)] if values else [])


def _change(values: Values, over_s: float = 1.0) -> Values:
    return Values((now - old) / over_s for old, now in values)


_FUNCTIONS: dict[str, Any] = {
    **{of.__name__: _aggregation(of) for of in (sum, max, min)},
    **dict.fromkeys(("rate", "deriv"), partial(_change, over_s=600)),
    **dict.fromkeys(("increase", "delta"), _change),
    "count": _aggregation(len),
    "label_replace": lambda values, *_: values,
}


def _matches(how: str, wanted: str, value: str) -> bool:
    same = re.fullmatch(wanted, value) is not None if how.endswith("~") else wanted == value
    return same != how.startswith("!")


def evaluate(expression: str, samples: Samples) -> Values:
    """Return the value of an expression; it is empty if an alert does not fire.

    The precedence of its operators is Python's, but for ``and`` and ``or``, which are only between
    its outermost parts. So Python evaluates it, once selectors are written as calls.
    """

    def select(name: str, inside: str, ranged: bool) -> Values:
        wanted = [("__name__", "=", name), *matchers(inside)]
        found = (
            values
            for labels, values in samples.items()
            if all(_matches(how, text, dict(labels).get(key, "")) for key, how, text in wanted)
        )
        return Values(found if ranged else (now for _, now in found))

    text = re.sub(r"#[^\n]*|\bby \([^)]*\)", "", expression)
    text = re.sub(
        r"\b((?:delaylevel|pulsar)_\w+)(\{[^}]*\})?(\[\w+\])?",
        lambda hit: f"select({hit[1]!r}, {hit[2] or ''!r}, {bool(hit[3])})",
        text,
    )
    signs = {"and": "&", "or": "|"}
    parts = re.split(r"\s(and|or)\s", text)
    text = " ".join(signs.get(part, f"({part})") for part in parts)
    found = eval(f"({text})", {"__builtins__": {}}, {**_FUNCTIONS, "select": select})
    assert isinstance(found, Values)
    return found


# -- the alerts

LEVEL = {"level_topic": "persistent://a/b/_orders-delay-level"}
PARTITION = {**LEVEL, "partition": "0"}
BROKER = {"namespace": "a/b", "subscription": SUBSCRIPTION}
FUNCTION = {"namespace": "a/b", "name": "orders-mover"}


def of_broker(what: str, topic: str) -> Labels:
    name = f"persistent://a/b/_orders-delay-level{topic}-partition-0"
    return series(f"pulsar_subscription_{what}", topic=name, **BROKER)


def consumers(topic: str) -> Labels:
    return series("pulsar_subscription_consumers_count", topic=f"{topic}-partition-0", **BROKER)


def function(metric: str) -> Labels:
    return series(
        "pulsar_function_user_metric_sum", metric=f"delaylevel_function_{metric}_total", **FUNCTION
    )


RELEASED = "delaylevel_dispatch_lateness_seconds"
LAG = series("delaylevel_mover_lag_seconds", **LEVEL)
#: For each rule: series, with their values ten minutes ago and now, when it fires and when not.
CASES: list[tuple[str, dict[Labels, tuple[float, float]], dict[Labels, tuple[float, float]]]] = [
    # Of each topic with our subscription, only one without a consumer that needs a mover counts.
    *(("NoMover", {consumers(topic): (1, 0)},
       {consumers(each): (0, int(TOPICS[each] is Role.LEVEL)) for each in TOPICS})
      for topic, role in TOPICS.items() if role is Role.LEVEL),
    ("NotServed", {series("delaylevel_process_refused", **LEVEL): (0, 1)}, {}),
    ("MoverBehind", {LAG: (0, 151)}, {LAG: (200, 149)}),
    ("LagGrows", {LAG: (31, 400)}, {LAG: (200, 210)}),
    ("FunctionBehind", {function("lag_seconds"): (0, 3_000), function("window"): (0, 10)},
     {function("lag_seconds"): (0, 10), function("window"): (0, 10)}),
    ("MoverRestarts", {series("delaylevel_mover_failures_total", **LEVEL): (1, 30)},
     {series("delaylevel_mover_failures_total", **LEVEL): (3, 4)}),
    ("MoverFails", {series("delaylevel_mover_state", state="failing", **LEVEL): (0, 1)},
     {series("delaylevel_mover_state", state="standby", **LEVEL): (0, 1)}),
    ("BrokerSilent", {series("delaylevel_mover_broker_answers"): (1, 0)},
     {series("delaylevel_mover_broker_answers"): (0, 1)}),
    ("HandsOffLate", {series("delaylevel_mover_lateness_seconds", **LEVEL): (0, 61)},
     {series("delaylevel_mover_lateness_seconds", **LEVEL): (61, 0)}),
    ("ReleasesLate",
     {series(f"{RELEASED}_bucket", le="1.0", **PARTITION): (0, 90),
      series(f"{RELEASED}_count", **PARTITION): (0, 100)},
     {series(f"{RELEASED}_bucket", le="1.0", **PARTITION): (0, 100),
      series(f"{RELEASED}_count", **PARTITION): (0, 100)}),
    *(("NoDispatcher", {consumers(topic): (1, 0)},
       {consumers(each): (0, int(TOPICS[each] is Role.WINDOW)) for each in TOPICS})
      for topic, role in TOPICS.items() if role is Role.WINDOW),
    ("DispatcherStandsStill",
     {series("delaylevel_dispatch_overdue_seconds", **PARTITION): (0, 31)},
     {series("delaylevel_dispatch_overdue_seconds", **PARTITION): (31, 2)}),
    ("NothingConfirmed",
     {series("delaylevel_dispatch_in_flight", **PARTITION): (9, 9),
      series("delaylevel_dispatch_released_total", **PARTITION): (5, 5)},
     {series("delaylevel_dispatch_in_flight", **PARTITION): (9, 9),
      series("delaylevel_dispatch_released_total", **PARTITION): (5, 6)}),
    *((rule, {series("delaylevel_dispatch_state", state=state, **PARTITION): (0, 1)},
       {series("delaylevel_dispatch_state", state="releasing", **PARTITION): (0, 1)})
      for rule, state in (("DiskError", "disk error"), ("DiskFull", "disk full"))),
    ("DeadLetters", {of_broker("back_log", "-DLQ"): (0, 1)},
     {of_broker("back_log", "-DLQ"): (1, 0), of_broker("back_log", "-held"): (0, 1)}),
    ("HeldGrows", {of_broker("back_log", "-held"): (3, 4)},
     {of_broker("back_log", "-held"): (4, 3)}),
    ("Dropped", {series("delaylevel_dispatch_dropped_total", **PARTITION): (3, 4)},
     {series("delaylevel_dispatch_dropped_total", **PARTITION): (4, 4)}),
    ("Dropped", {series("delaylevel_mover_messages_total", became="dropped", **LEVEL): (3, 4)},
     {series("delaylevel_mover_messages_total", became="due", **LEVEL): (3, 4)}),
    ("ProducerDisconnected", {series("delaylevel_producer_connected", target="x"): (1, 0)},
     {series("delaylevel_producer_connected", target="x"): (0, 1)}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_fires_when_it_should(
    rule: str,
    bad: dict[Labels, tuple[float, float]],
    good: dict[Labels, tuple[float, float]],
) -> None:
    (expression,) = [each["expr"] for each in RULES if each["alert"] == f"DelayLevel{rule}"]
    assert evaluate(expression, bad)
    assert not evaluate(expression, good)


def test_every_rule_was_fired() -> None:
    assert {f"DelayLevel{rule}" for rule, *_ in CASES} == {rule["alert"] for rule in RULES}


def test_the_dashboard_can_be_imported() -> None:
    identities = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identities)) == len(identities)
    variables = {item["name"] for item in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "1"}
    assert used == variables


def test_the_dashboard_shows_every_series_of_delaylevel() -> None:
    text = json.dumps(DASHBOARD)
    shown = {name for name, _ in SELECTOR.findall(text.replace('\\"', '"'))}
    shown |= set(re.findall(r"delaylevel_function_\w+", text))
    base = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SERIES}
    missing = {
        name
        for name in base
        if name.startswith("delaylevel_")
        and not shown & {name, f"{name}_bucket"}
        # For held messages and dead letters, the dashboard has the broker's series.
        and not re.fullmatch(r"delaylevel_mover_(held|dead_letter)_entries", name)
    }
    assert missing == set()
