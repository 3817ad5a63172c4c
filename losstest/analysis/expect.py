"""`--expect 'lost == 0 when journal == disk'`: a small language, parsed and evaluated without `eval`.

    expectation = condition ["when" condition]
    condition   = conjunction {"or" conjunction}
    conjunction = negation {"and" negation}
    negation    = "not" negation | comparison
    comparison  = sum [("==" | "!=" | "<" | "<=" | ">" | ">=") sum | "in" "(" sum {"," sum} ")"]
    sum         = product {("+" | "-") product}
    product     = atom {("*" | "/") atom}
    atom        = number | "text" | 'text' | word | "(" condition ")"

A word that is a field of a row is its value; any other word is text. To the left of a comparison a word must
be a field, so that a typing error is an error and not a text.
"""

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.losstest.model import REASONS, Row, Verdict

Value = float | str | bool | None
Node = Callable[[dict[str, Value]], Value]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)(?![\w.])|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<op>==|!=|<=|>=|[<>()+*/,-])|(?P<word>[A-Za-z_][\w.:]*(?:-[\w.]+)*))"
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_KEYWORDS = {"and", "or", "not", "in", "when"}
_NAMED = tuple(
    field.name
    for field in msgspec.structs.fields(Row)
    if field.type in (str, int, float, bool, float | None, Verdict)
)
FIELDS = frozenset(
    (*_NAMED, *REASONS, "latency_p50_ms", "latency_p99_ms", "latency_p999_ms", "findings", "true", "false")
)


def fields_of(row: Row) -> dict[str, Value]:
    """The values that an expectation can name."""
    values: dict[str, Value] = {name: getattr(row, name) for name in _NAMED}
    values |= {reason: row.lost_by_reason.get(reason, 0) for reason in REASONS}
    for name in ("p50", "p99", "p999"):
        values[f"latency_{name}_ms"] = getattr(row.latency_ms, name) if row.latency_ms else None
    values["findings"] = len(row.findings)
    return values | {"true": True, "false": False}


class Outcome(msgspec.Struct, frozen=True):
    """How an expectation fared: over how many rows, and which did not meet it."""

    text: str
    rows: int
    unmet: list[Row]
    undecided: list[Row]

    @property
    def met(self) -> bool:
        """True if it fitted at least one row, and every row that it fitted met it."""
        return bool(self.rows) and not self.unmet and not self.undecided

    @property
    def word(self) -> str:
        """met, NOT MET, or undecided."""
        return "met" if self.met else "undecided" if self.undecided and not self.unmet else "NOT MET"


class Expectation:
    """One parsed expectation. Raises ConfigError at construction if the text is not one."""

    def __init__(self, text: str) -> None:
        self.text = text
        parser = _Parser(text)
        self._wanted = parser.condition()
        self._when: Node = lambda _: True
        if parser.take("when"):
            self._when = parser.condition()
        parser.end()

    def check(self, rows: Iterable[Row]) -> Outcome:
        """Try it on the rows; rows whose verdict is unknown are neither met nor unmet."""
        fitting = [row for row in rows if self._when(fields_of(row))]
        unmet, undecided = [], []
        for row in fitting:
            if self._wanted(fields_of(row)):
                if row.verdict == "unknown":
                    undecided.append(row)
            elif row.verdict == "unknown":
                undecided.append(row)
            else:
                unmet.append(row)
        return Outcome(self.text, len(fitting), unmet, undecided)


class _Parser:
    def __init__(self, text: str) -> None:
        self._source = text
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(f"not understood from {text[at:].strip()[:20]!r} on")
            kind = match.lastgroup or ""
            self._tokens.append((kind, match.group(kind)))
            at = match.end()
        self._at = 0
        self._depth = 0

    def _error(self, problem: str) -> ConfigError:
        return ConfigError("--expect", f"{self._source!r}: {problem}")

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def take(self, *words: str) -> str:
        """Consume one of these operators or keywords, if it is next."""
        kind, text = self._peek()
        if kind in ("op", "word") and text in words:
            self._at += 1
            return text
        return ""

    def end(self) -> None:
        """Complain about what is left."""
        if self._peek()[0] != "end":
            raise self._error(f"unexpected {self._peek()[1]!r}")

    def condition(self) -> Node:
        self._depth += 1
        if self._depth > 50:
            raise self._error("nested too deeply")
        left = self._conjunction()
        while self.take("or"):
            left = _either(left, self._conjunction())
        self._depth -= 1
        return left

    def _conjunction(self) -> Node:
        left = self._negation()
        while self.take("and"):
            left = _both(left, self._negation())
        return left

    def _negation(self) -> Node:
        negated = False
        while self.take("not"):
            negated = not negated
        inner = self._comparison()
        return (lambda row: not inner(row)) if negated else inner

    def _comparison(self) -> Node:
        left = self._sum(left_side=True)
        sign = self.take(*_COMPARE)
        if sign:
            return _compare(sign, left, self._sum(left_side=False))
        if self.take("in"):
            if not self.take("("):
                raise self._error("after 'in' comes a list in parentheses")
            choices = [self._sum(left_side=False)]
            while self.take(","):
                choices.append(self._sum(left_side=False))
            self._close()
            return lambda row: left(row) in [choice(row) for choice in choices]
        return left

    def _close(self) -> None:
        if not self.take(")"):
            raise self._error("a ')' is missing")

    def _sum(self, left_side: bool) -> Node:
        left = self._product(left_side)
        while sign := self.take("+", "-"):
            left = _arithmetic(sign, left, self._product(left_side))
        return left

    def _product(self, left_side: bool) -> Node:
        left = self._atom(left_side)
        while sign := self.take("*", "/"):
            left = _arithmetic(sign, left, self._atom(left_side))
        return left

    def _atom(self, left_side: bool) -> Node:
        kind, text = self._peek()
        self._at += 1
        if kind == "number":
            return _constant(float(text))
        if kind == "text":
            return _constant(text[1:-1])
        if kind == "word" and text not in _KEYWORDS:
            if text in FIELDS:
                return lambda row: row[text]
            if left_side:
                raise self._error(f"there is no field {text!r}; fields: {', '.join(sorted(FIELDS))}")
            return _constant(text)
        if (kind, text) == ("op", "("):
            inner = self.condition()
            self._close()
            return inner
        if (kind, text) == ("op", "-"):
            inner = self._atom(left_side)
            return _arithmetic("-", _constant(0.0), inner)
        raise self._error("something is missing at the end" if kind == "end" else f"unexpected {text!r}")


def _constant(value: Value) -> Node:
    return lambda _: value


def _either(left: Node, right: Node) -> Node:
    return lambda row: bool(left(row)) or bool(right(row))


def _both(left: Node, right: Node) -> Node:
    return lambda row: bool(left(row)) and bool(right(row))


def _compare(sign: str, left: Node, right: Node) -> Node:
    def compare(row: dict[str, Value]) -> Value:
        a, b = left(row), right(row)
        if sign in ("==", "!="):
            return _COMPARE[sign](a, b)
        if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
            return False  # a time that was never reached is neither small nor large
        return _COMPARE[sign](a, b)

    return compare


def _arithmetic(sign: str, left: Node, right: Node) -> Node:
    def calculate(row: dict[str, Value]) -> Value:
        a, b = left(row), right(row)
        if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
            return None
        if sign == "/":
            return a / b if b else None
        return a + b if sign == "+" else a - b if sign == "-" else a * b

    return calculate
