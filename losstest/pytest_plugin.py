"""The `losstest` fixture: run a transport through a scenario inside a test, and expect something of the result.

Loaded by pytest itself (entry point `pytest11`) wherever brokerless is installed.
"""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import pytest

from brokerless.core.errors import ConfigError
from brokerless.losstest.adapters.base import Transport
from brokerless.losstest.analysis.expect import Expectation, fields_of
from brokerless.losstest.harness import quantities
from brokerless.losstest.harness.matrix import QUICK, Options, run_matrix
from brokerless.losstest.model import Row
from brokerless.losstest.registry import resolve, why_missing


class Measured:
    """What came out of one call of `run()`: a row per repeat."""

    def __init__(self, rows: list[Row], directory: Path) -> None:
        self.rows = rows
        self.directory = directory

    @property
    def row(self) -> Row:
        """The only row, or the first of several repeats."""
        return self.rows[0]

    def expect(self, *conditions: str, **equal: object) -> "Measured":
        """Fail the test unless every row meets every condition; returns itself.

        `conditions` are texts as for `--expect` (`"lost < 5 and duplicates == 0"`), `equal` names fields with their
        values (`lost=0`). A row must also have a verdict: `unknown` fails, because nothing is known. Name `verdict`
        yourself to expect something else.
        """
        __tracebackhide__ = True
        texts = [*conditions, *(f"{name} == {_literal(value)}" for name, value in equal.items())]
        for row in self.rows:
            if row.verdict == "unknown" and "verdict" not in equal:
                pytest.fail(f"{_describe(row)}: {'; '.join(row.problems)}", pytrace=False)
        for text in texts:
            outcome = _told(Expectation, text).check(self.rows)
            if outcome.unmet:
                pytest.fail(
                    "\n".join(f"{_describe(row)}: not met: {text}" for row in outcome.unmet), pytrace=False
                )
        return self


T = TypeVar("T")


def _told(make: Callable[..., T], *arguments: object) -> T:
    """The result; a mistake of the caller's fails the test in words, without our own lines."""
    __tracebackhide__ = True
    try:
        return make(*arguments)
    except ConfigError as error:
        said = str(error)
    pytest.fail(said, pytrace=False)  # outside, or pytest tells it twice


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else f'"{value}"'


def _describe(row: Row) -> str:
    figures = ", ".join(f"{name} {fields_of(row)[name]}" for name in ("accepted", "lost", "duplicates"))
    reasons = ", ".join(f"{count} {reason}" for reason, count in row.lost_by_reason.items())
    said = "; ".join((*row.problems, *row.findings))
    return f"{row.transport} · {row.scenario} · seed {row.seed}: {figures} ({reasons or 'no loss'}) {said}".strip()


class LossTest:
    """What the fixture gives to a test."""

    def __init__(self, directory: Path, properties: list[tuple[str, object]]) -> None:
        self._directory = directory
        self._properties = properties
        self._runs = 0

    def run(
        self,
        transport: Transport | str,
        scenario: str = "kill",
        *,
        rate: float = QUICK["rate"],
        size: int = 200,
        offline: float | str = QUICK["offline_s"],
        drain: float | str | None = None,
        seed: int = 1,
        repeat: int = 1,
        network: str = "relay",
    ) -> Measured:
        """Run the controls and one scenario; fails the test if a control does, because nothing can be believed then.

        `transport` is a name, `module:object` or a Transport that is a global of the calling module (its processes have
        to find it again). `offline` and `drain` are seconds or texts such as `10m`; `drain` is 10 s if it is not given,
        or as long as `offline` if that is longer. The figures are in JUnit's properties; witnesses are in the test's
        temporary directory.
        """
        __tracebackhide__ = True
        frame = inspect.currentframe()
        name = (
            transport if isinstance(transport, str) else _name_of(transport, frame.f_back if frame else None)
        )
        found = msgspec.structs.replace(_told(resolve, name), name=name)
        if missing := why_missing(found):
            pytest.skip(f"{name} cannot run here: {missing}")
        offline_s = _told(quantities.seconds, str(offline), "offline")
        drain_s = (
            max(QUICK["drain_s"], offline_s)
            if drain is None
            else _told(quantities.seconds, str(drain), "drain")
        )
        options = Options(
            transports=(name,),
            scenarios=(scenario,),
            rate=rate,
            size=size,
            lead_s=QUICK["lead_s"],
            offline_s=offline_s,
            tail_s=QUICK["tail_s"],
            drain_s=drain_s,
            seed=seed,
            repeat=repeat,
            jobs=1,
            network=network,  # type: ignore[arg-type]  # checked when the runs are planned
        )
        self._runs += 1
        out = self._directory / f"losstest-{self._runs}"
        result = _told(asyncio.run, run_matrix(options, {name: found}, out))
        if result.control_failed:
            pytest.fail(
                "a control failed: " + "; ".join(map(_describe, result.control_failed)), pytrace=False
            )
        rows = [row for row in result.rows if row.scenario == scenario]
        for row in rows:
            for measure in ("verdict", "accepted", "lost", "duplicates", "recovery_s"):
                what = f"losstest.{row.transport}.{scenario}.{row.seed}.{measure}"
                self._properties.append((what, getattr(row, measure)))
        return Measured(rows, out)


def _name_of(transport: Transport, frame: FrameType | None) -> str:
    __tracebackhide__ = True
    variables: dict[str, Any] = frame.f_globals if frame else {}
    for name, value in variables.items():
        if value is transport and "__file__" in variables:
            return f"{variables['__file__']}:{name}"
    pytest.fail(
        f"the transport {transport.name!r} must be a global of the module that calls losstest.run(): "
        "its processes load it from there",
        pytrace=False,
    )


@pytest.fixture
def losstest(tmp_path: Path, request: pytest.FixtureRequest) -> LossTest:
    """Run transports through faults: `losstest.run(transport, scenario="kill").expect(lost=0)`."""
    # As `record_property` does, which warns with pytest's own default for the format.
    return LossTest(tmp_path, request.node.user_properties)
