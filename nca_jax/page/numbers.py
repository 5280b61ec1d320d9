"""How the report writes numbers: a value as it is read, and its 95 % interval apart.

An estimate here is a mapping with "value", "low" and "high", as `intervals.Estimate` is in `metrics.summary`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

UNKNOWN = "–"


class Cell(NamedTuple):
    """A value as it is shown, and its 95 % interval."""

    text: str
    interval: str = ""

    def in_words(self) -> str:
        """Both, inside a sentence."""
        return f"{self.text} (95 % interval {self.interval})" if self.interval else self.text


def typeset(text: str) -> str:
    """Text as a page sets it: negative numbers with a minus as wide as a plus, and no line break before "%"."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", text).replace(" %", "\N{NO-BREAK SPACE}%")


def share(estimate: Mapping[str, Any]) -> Cell:
    """Per cent."""
    return _cell(estimate, lambda value: f"{100 * value:.1f}", " %")


def change(estimate: Mapping[str, Any]) -> Cell:
    """A difference of shares, in points, or a relative change, per cent: with its sign."""
    return _cell(estimate, lambda value: f"{100 * value:+.1f}")


def amount(estimate: Mapping[str, Any] | None, digits: int) -> Cell:
    """A quantity in its own unit; None: it was not measured."""
    return _cell(estimate, lambda value: f"{value:.{digits}f}") if estimate else Cell(UNKNOWN)


def probability(p: float) -> str:
    """A p value."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _cell(estimate: Mapping[str, Any], text: Callable[[float], str], unit: str = "") -> Cell:
    if estimate["value"] is None:
        return Cell(UNKNOWN)
    interval = "" if estimate["low"] is None else f"{text(estimate['low'])} to {text(estimate['high'])}"
    return Cell(text(estimate["value"]) + unit, interval)
