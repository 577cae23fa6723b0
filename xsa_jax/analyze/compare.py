"""Compares runs that differ in attention alone.

    python -m xsa_jax.analyze.compare runs/sa runs/xsa --output runs/report

Reads what training and eval.py wrote, prints a table and writes it as table.md and table.json, with three pictures. The
first run is the one that the others are compared with.
"""

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xsa_jax.analyze import files, labels, plots
from xsa_jax.analyze.runs import Run, read
from xsa_jax.config import UserError, flatten
from xsa_jax.data.store import write_json

# Fields that may differ: what is compared, and what changes neither the model nor its step time. Whether `data.path` names
# the same text is seen by the store's hash instead.
_FREE = ("attention.", "checkpoint.", "data.path", "data.workers", "eval.", "train.log_every")

CAUTION = (
    "One pair of runs proves nothing: expect gains of 0.003 to 0.01 nats at small scale, while two seeds of the same model often "
    "differ by more. Nothing smaller than several paired seeds can show that."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a number per run, and how the others differ from the first."""

    label: str
    values: list[float]
    digits: int
    compared: bool = False

    def changes(self) -> list[float | None]:
        """The first run's number minus that of each other."""
        first, *others = self.values
        return [first - other if self.compared else None for other in others]


def compare(paths: Sequence[pathlib.Path], output: pathlib.Path, allow: Sequence[str] = ()) -> str:
    """Writes the comparison into `output` and returns the table as markdown.

    Args:
      paths: folders of runs, at least two; each evaluated by eval.py at a step that all share.
      output: a folder.
      allow: config fields, or groups of them, that may differ beside `attention`.

    Raises:
      UserError: a run that is not one, is damaged or is not evaluated; runs that differ in more than they may, naming the fields.
      OSError: `output` cannot be written.
    """
    if len(paths) < 2:
        raise UserError(f"found {len(paths)} run; expected two or more to compare")
    runs = [read(path) for path in paths]
    for run in runs[1:]:
        _check_comparable(runs[0], run, allow)
    step = _common_step(runs)
    evaluations = [run.evaluations[step] for run in runs]
    _check_same_text(runs, evaluations)
    names = _short_names(runs)
    rows = table(runs, evaluations)
    markdown = _markdown(names, rows, step, runs)

    named = dict(zip(names, runs, strict=True))
    evaluated = dict(zip(names, evaluations, strict=True))
    result = {
        "step": step,
        "caution": CAUTION,
        "runs": {name: {"path": run.name, "devices": run.devices} for name, run in named.items()},
        "rows": [_row_json(row, names) for row in rows],
    }
    output.mkdir(parents=True, exist_ok=True)
    files.write(output / "table.md", markdown.encode())
    write_json(output / "table.json", result)
    plots.loss_curves({name: run.records for name, run in named.items()}, output / "loss.png")
    plots.buckets({name: e["losses"][0]["buckets"] for name, e in evaluated.items()}, output / "position.png")
    plots.similarity({name: e["similarity"] for name, e in evaluated.items()}, output / "similarity.png")
    return markdown


def table(runs: Sequence[Run], evaluations: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of the comparison."""
    losses = [evaluation["losses"][0] for evaluation in evaluations]
    rows = [
        Row("validation loss, nats per token", _numbers(losses, "loss"), 4, compared=True),
        Row("bits per byte", _numbers(losses, "bits_per_byte"), 4, compared=True),
        Row("perplexity", _numbers(losses, "perplexity"), 3),
    ]
    for same in zip(*(loss["buckets"] for loss in losses), strict=True):
        rows.append(Row(f"loss at position {labels.positions(same[0])}", _numbers(same, "loss"), 4, compared=True))
    others = [{loss["context"]: loss for loss in evaluation["losses"][1:]} for evaluation in evaluations]
    for context in sorted(set(others[0]).intersection(*others)):
        values = _numbers([losses[context] for losses in others], "loss")
        rows.append(Row(f"loss at context {context}", values, 4, compared=True))
    rows.append(Row("step time, of the first run's", _relative_step_times(runs), 3))
    for statistic, label in labels.STATISTICS.items():
        values = [float(np.mean(np.array(evaluation["similarity"][statistic], dtype=float))) for evaluation in evaluations]
        rows.append(Row(label, values, 3))
    return rows


def _check_comparable(first: Run, other: Run, allow: Sequence[str]) -> None:
    a, b = dict(flatten(first.config)), dict(flatten(other.config))
    free = (*_FREE, *allow)
    changed = [
        f"{name} ({a.get(name, '<absent>')!r} and {b.get(name, '<absent>')!r})"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name) and not any(name == f or name.startswith(f.rstrip(".") + ".") for f in free)
    ]
    if changed:
        raise UserError(
            f"{first.name} and {other.name} differ in more than attention: {'; '.join(changed)}. Their difference would have more "
            f"than one cause; name the fields after --allow to compare them all the same"
        )


def _common_step(runs: Sequence[Run]) -> int:
    common = set.intersection(*(set(run.evaluations) for run in runs))
    if not common:
        found = "; ".join(f"{run.name}: {', '.join(map(str, sorted(run.evaluations)))}" for run in runs)
        raise UserError(f"no step at which eval.py evaluated all runs; found {found}. Run eval.py --step N on each")
    return max(common)


def _check_same_text(runs: Sequence[Run], evaluations: Sequence[Mapping[str, Any]]) -> None:
    def identity(evaluation: Mapping[str, Any]) -> dict[str, Any]:
        loss = evaluation["losses"][0]
        return {"store": evaluation["store"]["hash"], "context": loss["context"], "tokens": loss["tokens"]}

    first = identity(evaluations[0])
    for run, evaluation in zip(runs[1:], evaluations[1:], strict=True):
        if identity(evaluation) != first:
            raise UserError(
                f"{runs[0].name} and {run.name} were not evaluated on the same text: {first} and {identity(evaluation)}. "
                f"Run eval.py on both with the same --store and --tokens"
            )


def _numbers(items: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [math.nan if item[name] is None else item[name] for item in items]


def _relative_step_times(runs: Sequence[Run]) -> list[float]:
    """Median step times over that of the first run; nan where the devices differ. Seconds mean nothing on another machine."""
    times = [_step_time(run) for run in runs]
    same_devices = len({run.devices for run in runs}) == 1
    return [time / times[0] if same_devices else math.nan for time in times]


def _step_time(run: Run) -> float:
    """Median seconds. The first record of each start, which holds the compilation, has no step time."""
    times = [record["step_time"] for record in run.records if "step_time" in record]
    return statistics.median(times) if times else math.nan


def _short_names(runs: Sequence[Run]) -> list[str]:
    """ "SA", "XSA" where the kinds tell the runs apart, else the folders."""
    kinds = [run.config["attention"]["kind"].upper() for run in runs]
    return kinds if len(set(kinds)) == len(runs) else [run.name for run in runs]


def _row_json(row: Row, names: Sequence[str]) -> dict[str, Any]:
    values = {name: None if math.isnan(value) else value for name, value in zip(names, row.values, strict=True)}
    changes = dict(zip(names[1:], row.changes(), strict=True)) if row.compared else {}
    changes = {name: None if change is None or math.isnan(change) else change for name, change in changes.items()}
    return {"label": row.label, "values": values, "compared": row.compared, "changes": changes}


def _markdown(names: Sequence[str], rows: Sequence[Row], step: int, runs: Sequence[Run]) -> str:
    first, *others = names
    head = ["", *names, *(f"{first} - {other}" for other in others)]
    lines = [head]
    for row in rows:
        changes = [_change(row, change) for change in row.changes()]
        lines.append([row.label, *("-" if math.isnan(value) else f"{value:.{row.digits}f}" for value in row.values), *changes])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    rule = " | ".join("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths))
    body = "\n".join(f"| {line} |" for line in [cells[0], rule, *cells[1:]])
    where = "; ".join(f"{name}: {run.name}, {run.devices}" for name, run in zip(names, runs, strict=True))
    return f"{body}\n\nStep {step}. {where}. Means over layers and heads. {labels.LEGEND}\n\n{CAUTION}\n"


def _change(row: Row, change: float | None) -> str:
    if change is None or math.isnan(change):
        return ""
    return f"{change:+.{row.digits}f}"


def main(argv: Sequence[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m xsa_jax.analyze.compare", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of runs; the first is compared with the others")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="folder for the table and the pictures")
    parser.add_argument("--allow", nargs="+", default=[], metavar="FIELD", help="config fields that may differ: seed optim")
    args = parser.parse_args(argv)
    try:
        markdown = compare(args.runs, args.output, args.allow)
    except (UserError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(f"{markdown}\nwritten: {args.output}/table.md, table.json, loss.png, position.png, similarity.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
