"""The part of PromQL that docs/alerts.yml uses, evaluated over samples of a test.

A series is its labels, with ``__name__``, and values at times in s. ``rate``, ``increase``,
``delta`` and ``deriv`` take the first and last sample of their range, without extrapolation.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

Labels = frozenset[tuple[str, str]]
Samples = Mapping[Labels, Sequence[tuple[float, float]]]

_SELECTOR = re.compile(r"\b((?:delaylevel|pulsar)_\w+)(\{[^}]*\})?(?:\[(\d+)([smhd])\])?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def series(name: str, /, **labels: str) -> Labels:
    """Return the labels of a series."""
    return frozenset({"__name__": name, **labels}.items())


def _nameless(labels: Labels) -> Labels:
    return frozenset(item for item in labels if item[0] != "__name__")


class Vector(dict[Labels, Any]):
    """Values by labels, with the operators of PromQL; a comparison drops those that fail it."""

    def _with(self, other: Any, of: Callable[[Any, Any], float]) -> Vector:
        if not isinstance(other, Vector):
            return Vector({labels: of(each, other) for labels, each in self.items()})
        others = other.nameless()
        pairs = ((_nameless(labels), each) for labels, each in self.items())
        return Vector({name: of(each, others[name]) for name, each in pairs if name in others})

    def nameless(self) -> dict[Labels, Any]:
        """Return the values by labels without the name of the series."""
        return {_nameless(labels): each for labels, each in self.items()}

    def __truediv__(self, other: Any) -> Vector:
        return self._with(other, operator.truediv)

    def __rsub__(self, other: Any) -> Vector:
        return self._with(other, lambda mine, theirs: theirs - mine)

    def __gt__(self, bound: float) -> Vector:
        return Vector({labels: each for labels, each in self.items() if each > bound})

    def __eq__(self, bound: object) -> Vector:  # type: ignore[override]
        return Vector({labels: each for labels, each in self.items() if each == bound})

    def __and__(self, other: Vector) -> Vector:
        known = other.nameless()
        return Vector({name: each for name, each in self.items() if _nameless(name) in known})

    def __or__(self, other: Any) -> Any:
        known = self.nameless()
        more = {name: each for name, each in other.items() if _nameless(name) not in known}
        return Vector({**self, **more})


def _aggregation(of: Callable[[list[float]], float]) -> Any:
    def by(names: str) -> Callable[[Vector], Vector]:
        def aggregate(value: Vector) -> Vector:
            groups: dict[Labels, list[float]] = {}
            for labels, each in value.items():
                group = frozenset(item for item in labels if item[0] in re.split(r"\W+", names))
                groups.setdefault(group, []).append(each)
            return Vector({labels: float(of(found)) for labels, found in groups.items()})

        return aggregate

    return by


def _change(ranges: Vector, *, per_second: bool = False) -> Vector:
    found = Vector()
    for labels, values in ranges.items():
        if len(values) > 1:
            (first_s, first), (last_s, last) = values[0], values[-1]
            found[_nameless(labels)] = (last - first) / (last_s - first_s if per_second else 1)
    return found


def _label_replace(value: Vector, to: str, replacement: str, source: str, pattern: str) -> Vector:
    replaced = Vector()
    for labels, each in value.items():
        by_name = dict(labels)
        if matched := re.fullmatch(pattern, by_name.get(source, "")):
            by_name[to] = matched.expand(replacement.replace("$", "\\"))
        replaced[frozenset(by_name.items())] = each
    return replaced


_per_second = partial(_change, per_second=True)
_FUNCTIONS: dict[str, Any] = {
    **{of.__name__: _aggregation(of) for of in (sum, max, min)},
    **dict.fromkeys(("rate", "deriv"), _per_second),
    **dict.fromkeys(("increase", "delta"), _change),
    "count": _aggregation(len),
    "label_replace": _label_replace,
}


def _matches(how: str, wanted: str, value: str) -> bool:
    same = re.fullmatch(wanted, value) is not None if how.endswith("~") else wanted == value
    return same != how.startswith("!")


def evaluate(expression: str, samples: Samples, now_s: float) -> Vector:
    """Return the value of an expression; it is empty if an alert does not fire.

    The precedence of its operators is Python's, but for ``and`` and ``or``, which are only between
    its outermost parts. So Python evaluates it, once selectors and ``by`` are written as calls.
    """

    def select(name: str, inside: str, range_s: int) -> Vector:
        wanted = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"', inside)
        wanted.append(("__name__", "=", name))
        found = Vector()
        for labels, values in samples.items():
            if all(_matches(how, text, dict(labels).get(key, "")) for key, how, text in wanted):
                first_s = now_s - range_s if range_s else float("-inf")
                within = [each for each in values if first_s <= each[0] <= now_s]
                if within:
                    found[labels] = within if range_s else within[-1][1]
        return found

    text = re.sub(r"#[^\n]*", "", expression)
    text = re.sub(r"(\w+) by \(([^)]*)\)\s*\(", r"\1('\2')(", text)
    text = _SELECTOR.sub(
        lambda hit: (
            f"select({hit[1]!r}, {hit[2] or ''!r}, {_UNITS[hit[4] or 's'] * int(hit[3] or 0)})"
        ),
        text,
    )
    signs = {"and": "&", "or": "|"}
    parts = re.split(r"\s(and|or)\s", text)
    text = " ".join(signs.get(part, f"({part})") for part in parts)
    found = eval(f"({text})", {"__builtins__": {}}, {**_FUNCTIONS, "select": select})
    assert isinstance(found, Vector)
    return found
