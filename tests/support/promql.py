"""The part of PromQL that docs/alerts.yml uses, evaluated over samples of a test.

A series is its labels, with ``__name__``, and values at times in s. ``rate``, ``increase``,
``delta`` and ``deriv`` take the first and last sample of their range, without extrapolation.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Samples = Mapping[Labels, Sequence[tuple[float, float]]]

_TOKEN = re.compile(
    r'\s*(?:#[^\n]*\s*)?("(?:[^"\\]|\\.)*"|\d+(?:\.\d+)?[smhd]?|\w+|==|!=|=~|!~|>=|<=|[-+/*()\[\]{},=<>])'
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_ARITHMETIC = {"/": operator.truediv, "-": operator.sub, "+": operator.add}
_COMPARE = {">": operator.gt, "<": operator.lt, "==": operator.eq}
_AGGREGATE: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
_AGGREGATE["count"] = len
_MATCH: dict[str, Callable[[str, str], bool]] = {
    "=": lambda wanted, value: wanted == value,
    "!=": lambda wanted, value: wanted != value,
    "=~": lambda wanted, value: re.fullmatch(wanted, value) is not None,
    "!~": lambda wanted, value: re.fullmatch(wanted, value) is None,
}


def series(name: str, /, **labels: str) -> Labels:
    """Return the labels of a series."""
    return frozenset({"__name__": name, **labels}.items())


def evaluate(expression: str, samples: Samples, now_s: float) -> Vector:
    """Return the value of an expression; it is empty if an alert does not fire."""
    parser = _Parser(expression, samples, now_s)
    value = parser.logical()
    assert not parser.tokens, f"not understood: {parser.tokens}"
    assert isinstance(value, dict)
    return value


def _nameless(labels: Labels) -> Labels:
    return frozenset(item for item in labels if item[0] != "__name__")


class _Parser:
    """A parser that evaluates as it reads; precedence grows from `logical` to `primary`."""

    def __init__(self, text: str, samples: Samples, now_s: float) -> None:
        bare = re.sub(r"#[^\n]*", "", text)
        self.tokens = _TOKEN.findall(bare)
        assert "".join(self.tokens) == re.sub(r'\s+(?=(?:[^"]*"[^"]*")*[^"]*$)', "", bare)
        self._samples, self._now_s = samples, now_s

    def _next(self, *wanted: str) -> str:
        token = str(self.tokens.pop(0))
        assert not wanted or token in wanted, (token, wanted)
        return token

    def _peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def logical(self) -> Vector | float:
        value = self._conjunction()
        while self._peek() == "or":
            self._next()
            other = self._conjunction()
            assert isinstance(value, dict)
            assert isinstance(other, dict)
            known = {_nameless(labels) for labels in value}
            value |= {each: found for each, found in other.items() if _nameless(each) not in known}
        return value

    def _conjunction(self) -> Vector | float:
        value = self._comparison()
        while self._peek() == "and":
            self._next()
            other = self._comparison()
            assert isinstance(value, dict)
            assert isinstance(other, dict)
            known = {_nameless(labels) for labels in other}
            value = {each: found for each, found in value.items() if _nameless(each) in known}
        return value

    def _comparison(self) -> Vector | float:
        value = self._sum()
        while self._peek() in _COMPARE:
            compare, bound = _COMPARE[self._next()], self._sum()
            assert isinstance(value, dict)
            assert not isinstance(bound, dict)
            value = {labels: each for labels, each in value.items() if compare(each, bound)}
        return value

    def _sum(self, operators: str = "-+") -> Vector | float:
        value = self._sum("/") if operators == "-+" else self._primary()
        while self._peek() and self._peek() in operators:
            apply = _ARITHMETIC[self._next()]
            other = self._sum("/") if operators == "-+" else self._primary()
            value = _combined(apply, value, other)
        return value

    def _primary(self) -> Vector | float:
        token = self._next()
        if token == "(":
            value = self.logical()
            self._next(")")
            return value
        if token[0].isdigit():
            return float(token)
        if token in _AGGREGATE:
            return self._aggregate(_AGGREGATE[token])
        if token in ("rate", "increase", "delta", "deriv"):
            self._next("(")
            name, matchers, range_s = self._selector(self._next())
            self._next(")")
            return self._change(name, matchers, range_s, per_second=token in ("rate", "deriv"))
        if token == "label_replace":
            return self._label_replace()
        name, matchers, _ = self._selector(token)
        return {labels: found[-1][1] for labels, found in self._selected(name, matchers) if found}

    def _aggregate(self, of: Callable[[list[float]], float]) -> Vector:
        by: list[str] = []
        if self._peek() == "by":
            self._next()
            by = self._names()
        self._next("(")
        value = self.logical()
        self._next(")")
        assert isinstance(value, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, each in value.items():
            group = frozenset(item for item in labels if item[0] in by)
            groups.setdefault(group, []).append(each)
        return {labels: float(of(found)) for labels, found in groups.items()}

    def _names(self) -> list[str]:
        self._next("(")
        found = []
        while (token := self._next()) != ")":
            found += [] if token == "," else [token]
        return found

    def _selector(self, name: str) -> tuple[str, list[tuple[str, str, str]], float]:
        matchers, range_s = [], 0.0
        if self._peek() == "{":
            self._next()
            while self._peek() != "}":
                label, how, text = self._next(), self._next(*_MATCH), self._next()
                matchers.append((label, how, text[1:-1]))
                if self._peek() == ",":
                    self._next()
            self._next("}")
        if self._peek() == "[":
            self._next()
            length = self._next()
            range_s = float(length[:-1]) * _UNITS[length[-1]]
            self._next("]")
        return name, matchers, range_s

    def _selected(
        self, name: str, matchers: list[tuple[str, str, str]]
    ) -> list[tuple[Labels, list[tuple[float, float]]]]:
        found = []
        for labels, values in self._samples.items():
            by_name = dict(labels)
            if by_name["__name__"] == name and all(
                _MATCH[how](text, by_name.get(label, "")) for label, how, text in matchers
            ):
                found.append((labels, [each for each in values if each[0] <= self._now_s]))
        return found

    def _change(
        self, name: str, matchers: list[tuple[str, str, str]], range_s: float, *, per_second: bool
    ) -> Vector:
        value = {}
        for labels, found in self._selected(name, matchers):
            inside = [each for each in found if each[0] >= self._now_s - range_s]
            if len(inside) > 1:
                (first_s, first), (last_s, last) = inside[0], inside[-1]
                passed_s = last_s - first_s if per_second else 1.0
                value[_nameless(labels)] = (last - first) / passed_s
        return value

    def _label_replace(self) -> Vector:
        self._next("(")
        value = self.logical()
        assert isinstance(value, dict)
        texts = []
        while self._next(",", ")") == ",":
            texts.append(self._next()[1:-1])
        target, replacement, source, pattern = texts
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
    if not isinstance(left, dict) and not isinstance(right, dict):
        return apply(left, right)
    if not isinstance(left, dict):
        assert isinstance(right, dict)
        return {labels: apply(left, each) for labels, each in right.items()}
    if not isinstance(right, dict):
        return {labels: apply(each, right) for labels, each in left.items()}
    others = {_nameless(labels): each for labels, each in right.items()}
    return {
        _nameless(labels): apply(each, others[_nameless(labels)])
        for labels, each in left.items()
        if _nameless(labels) in others
    }
