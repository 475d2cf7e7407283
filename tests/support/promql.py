"""The part of PromQL that docs/alerts.yml uses, evaluated over samples of a test.

A series is its labels, with ``__name__``, and values at times in s. ``rate``, ``increase``,
``delta`` and ``deriv`` take the first and last sample of their range, without extrapolation.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Samples = Mapping[Labels, Sequence[tuple[float, float]]]

_SELECTOR = re.compile(r"\b((?:delaylevel|pulsar)_\w+)(\{[^}]*\})?(?:\[(\d+)([smhd])\])?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Div: operator.truediv,
    ast.Sub: operator.sub,
    ast.Add: operator.add,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.Eq: operator.eq,
}
_AGGREGATE: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
_AGGREGATE["count"] = len


def series(name: str, /, **labels: str) -> Labels:
    """Return the labels of a series."""
    return frozenset({"__name__": name, **labels}.items())


def evaluate(expression: str, samples: Samples, now_s: float) -> Vector:
    """Return the value of an expression; it is empty if an alert does not fire.

    The precedence of its operators is Python's, so that Python parses it, once selectors and
    ``by`` are written as calls.
    """
    text = re.sub(r"#[^\n]*", "", expression)
    text = re.sub(r"(\w+) by \(([^)]*)\)\s*\(", r"\1('\2')(", text)
    text = _SELECTOR.sub(
        lambda hit: (
            f"select({hit[1]!r}, {hit[2] or ''!r}, {_UNITS[hit[4] or 's'] * int(hit[3] or 0)})"
        ),
        text,
    )
    found = _Evaluation(samples, now_s).value(ast.parse(f"({text})", mode="eval").body)
    assert isinstance(found, dict)
    return found


def _nameless(labels: Labels) -> Labels:
    return frozenset(item for item in labels if item[0] != "__name__")


class _Evaluation:
    def __init__(self, samples: Samples, now_s: float) -> None:
        self._samples, self._now_s = samples, now_s

    def value(self, node: ast.expr) -> Vector | float:
        if isinstance(node, ast.Constant):
            return float(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.BoolOp):
            join = _either if isinstance(node.op, ast.Or) else _both
            return reduce(join, map(self.vector, node.values))
        if isinstance(node, ast.Compare):
            ((compare,), (bound,)) = node.ops, map(self.value, node.comparators)
            holds = _OPERATORS[type(compare)]
            value = self.vector(node.left)
            return {labels: each for labels, each in value.items() if holds(each, bound)}  # type: ignore[arg-type]
        if isinstance(node, ast.BinOp):
            return _combined(
                _OPERATORS[type(node.op)], self.value(node.left), self.value(node.right)
            )
        assert isinstance(node, ast.Call), f"not understood: {ast.unparse(node)}"
        if isinstance(node.func, ast.Call):
            name, by = ast.unparse(node.func.func), re.split(r"\W+", _text(node.func.args[0]))
            return self._aggregate(_AGGREGATE[name], by, self.vector(node.args[0]))
        name = ast.unparse(node.func)
        if name == "select":
            found = self._selected(node)
            return {labels: values[-1][1] for labels, values in found.items() if values}
        if name == "label_replace":
            return _label_replaced(self.vector(node.args[0]), *map(_text, node.args[1:]))
        assert name in ("rate", "increase", "delta", "deriv"), name
        return self._change(node.args[0], per_second=name in ("rate", "deriv"))

    def vector(self, node: ast.expr) -> Vector:
        found = self.value(node)
        assert isinstance(found, dict)
        return found

    def _selected(self, node: ast.expr) -> dict[Labels, list[tuple[float, float]]]:
        """Return the series that a selector names, with their values in its range."""
        assert isinstance(node, ast.Call)
        name, inside, range_s = map(ast.literal_eval, node.args)
        matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"', inside)
        first_s = self._now_s - range_s if range_s else float("-inf")
        return {
            labels: [each for each in values if first_s <= each[0] <= self._now_s]
            for labels, values in self._samples.items()
            if dict(labels)["__name__"] == name
            and all(
                _matches(how, text, dict(labels).get(label, "")) for label, how, text in matchers
            )
        }

    def _aggregate(
        self, of: Callable[[list[float]], float], by: list[str], value: Vector
    ) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, each in value.items():
            group = frozenset(item for item in labels if item[0] in by)
            groups.setdefault(group, []).append(each)
        return {labels: float(of(found)) for labels, found in groups.items()}

    def _change(self, selector: ast.expr, *, per_second: bool) -> Vector:
        value = {}
        for labels, found in self._selected(selector).items():
            if len(found) > 1:
                (first_s, first), (last_s, last) = found[0], found[-1]
                value[_nameless(labels)] = (last - first) / (last_s - first_s if per_second else 1)
        return value


def _text(node: ast.expr) -> str:
    return str(ast.literal_eval(node))


def _matches(how: str, wanted: str, value: str) -> bool:
    same = re.fullmatch(wanted, value) is not None if how.endswith("~") else wanted == value
    return same != how.startswith("!")


def _either(left: Vector, right: Vector) -> Vector:
    known = {_nameless(labels) for labels in left}
    return left | {each: found for each, found in right.items() if _nameless(each) not in known}


def _both(left: Vector, right: Vector) -> Vector:
    known = {_nameless(labels) for labels in right}
    return {each: found for each, found in left.items() if _nameless(each) in known}


def _label_replaced(
    value: Vector, target: str, replacement: str, source: str, pattern: str
) -> Vector:
    replaced = {}
    for labels, each in value.items():
        by_name = dict(labels)
        if matched := re.fullmatch(pattern, by_name.get(source, "")):
            by_name[target] = matched.expand(replacement.replace("$", "\\"))
        replaced[frozenset(by_name.items())] = each
    return replaced


def _combined(
    apply: Callable[[float, float], float], left: Vector | float, right: Vector | float
) -> Vector | float:
    if not isinstance(right, dict):
        assert isinstance(left, dict)
        return {labels: apply(each, right) for labels, each in left.items()}
    if not isinstance(left, dict):
        return {labels: apply(left, each) for labels, each in right.items()}
    others = {_nameless(labels): each for labels, each in right.items()}
    return {
        _nameless(labels): apply(each, others[_nameless(labels)])
        for labels, each in left.items()
        if _nameless(labels) in others
    }
