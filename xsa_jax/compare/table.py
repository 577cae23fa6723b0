"""The table of a comparison, as markdown and as JSON."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xsa_jax import labels


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      label: name of the measurement.
      values: one number per run; nan for a number that does not exist.
      digits: number of digits after the decimal point.
      compared: whether the table shows the number of the first run minus that of each other run.
    """

    label: str
    values: list[float]
    digits: int
    compared: bool = False

    def changes(self) -> list[float | None]:
        """The number of the first run minus that of each other run; None if the row is not compared."""
        first, *others = self.values
        return [first - other if self.compared else None for other in others]


def rows(evaluations: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of losses and similarity statistics, from one evaluation per run."""
    losses = [evaluation["losses"][0] for evaluation in evaluations]
    table_rows = [
        Row("validation loss, nats per token", _numbers(losses, "loss"), 4, compared=True),
        Row("bits per byte", _numbers(losses, "bits_per_byte"), 4, compared=True),
        Row("perplexity", _numbers(losses, "perplexity"), 3),
    ]
    for same_bucket in zip(*(loss["buckets"] for loss in losses), strict=True):
        table_rows.append(
            Row(f"loss at position {labels.positions(same_bucket[0])}", _numbers(same_bucket, "loss"), 4, compared=True)
        )
    others = [{loss["context"]: loss for loss in evaluation["losses"][1:]} for evaluation in evaluations]
    for context in sorted(set(others[0]).intersection(*others)):
        values = _numbers([losses[context] for losses in others], "loss")
        table_rows.append(Row(f"loss at context {context}", values, 4, compared=True))
    for statistic, label in labels.STATISTICS.items():
        values = [float(np.mean(np.array(evaluation["similarity"][statistic], dtype=float))) for evaluation in evaluations]
        table_rows.append(Row(label, values, 3))
    return table_rows


def to_json(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """A row as plain values by names of runs, with null for a number that does not exist."""
    values = {name: None if math.isnan(value) else value for name, value in zip(names, row.values, strict=True)}
    changes = dict(zip(names[1:], row.changes(), strict=True)) if row.compared else {}
    changes = {name: None if change is None or math.isnan(change) else change for name, change in changes.items()}
    return {"label": row.label, "values": values, "compared": row.compared, "changes": changes}


def markdown(names: Sequence[str], table_rows: Sequence[Row]) -> str:
    """The rows as a markdown table with aligned columns."""
    first, *others = names
    lines = [["", *names, *(f"{first} - {other}" for other in others)]]
    for row in table_rows:
        changes = [_change(row, change) for change in row.changes()]
        lines.append([row.label, *("-" if math.isnan(value) else f"{value:.{row.digits}f}" for value in row.values), *changes])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    rule = " | ".join("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths))
    return "\n".join(f"| {line} |" for line in [cells[0], rule, *cells[1:]])


def _change(row: Row, change: float | None) -> str:
    if change is None or math.isnan(change):
        return ""
    return f"{change:+.{row.digits}f}"


def _numbers(items: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [math.nan if item[name] is None else item[name] for item in items]
