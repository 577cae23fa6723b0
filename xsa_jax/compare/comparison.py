"""The comparison of runs that differ in attention alone, written as a table and plots."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from xsa_jax import labels
from xsa_jax.compare import plots, table
from xsa_jax.compare.runs import Run, read, read_step_times
from xsa_jax.compare.table import Row
from xsa_jax.config import to_dict
from xsa_jax.config.rules import check_fields, differences, fixed_in_comparisons
from xsa_jax.config.stored import digest
from xsa_jax.errors import UserError
from xsa_jax.files import write_json, write_text

CAUTION = (
    "One pair of runs proves nothing: expect gains of 0.003 to 0.01 nats at small scale, while two seeds of the same model often "
    "differ by more. Nothing smaller than several paired seeds can show that."
)


def compare(
    paths: Sequence[pathlib.Path],
    output: pathlib.Path,
    allow: Sequence[str] = (),
    step_times: pathlib.Path | None = None,
) -> str:
    """Writes the comparison into `output`, and returns the table as markdown.

    Args:
      paths: folders of at least two runs, which eval.py has evaluated at a common step. The others are compared with the first.
      output: folder for the table and the plots.
      allow: names of config fields or groups that may differ in addition to `attention`.
      step_times: output file of `xsa_jax.train.step_time` for these runs. Without it the table has no step times, because those of
        training depend on the load of the machine.

    Raises:
      UserError: a folder holds no run, or a run is damaged or not evaluated; the runs differ in other fields, which the message
        names; or the step times belong to other runs.
      OSError: `output` cannot be written.
    """
    if len(paths) < 2:
        raise UserError(f"found {len(paths)} run; expected two or more to compare")
    _check_distinct(paths)
    check_fields(allow)
    runs = [read(path) for path in paths]
    for run in runs[1:]:
        _check_comparable(runs[0], run, allow)
    step = _common_step(runs)
    evaluations = [run.evaluations[step] for run in runs]
    _check_same_text(runs, evaluations)
    names = _short_names(runs)
    rows = table.rows(evaluations)
    if step_times is not None:
        rows.append(_step_time_row(runs, step_times))
    where = "; ".join(f"{name}: {run.name}, {run.devices}" for name, run in zip(names, runs, strict=True))
    markdown = f"{table.markdown(names, rows)}\n\nStep {step}. {where}. Means over layers and heads. {labels.LEGEND}\n\n{CAUTION}\n"
    runs_by_name = dict(zip(names, runs, strict=True))
    evaluations_by_name = dict(zip(names, evaluations, strict=True))
    result = {
        "step": step,
        "caution": CAUTION,
        "runs": {name: {"path": run.name, "devices": run.devices} for name, run in runs_by_name.items()},
        "rows": [table.to_json(row, names) for row in rows],
    }
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "table.md", markdown)
    write_json(output / "table.json", result)
    plots.loss_curves({name: run.records for name, run in runs_by_name.items()}, output / "loss.png")
    plots.buckets({name: e["losses"][0]["buckets"] for name, e in evaluations_by_name.items()}, output / "position.png")
    plots.similarity({name: e["similarity"] for name, e in evaluations_by_name.items()}, output / "similarity.png")
    return markdown


def _check_distinct(paths: Sequence[pathlib.Path]) -> None:
    folders = [path.resolve() for path in paths]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise UserError(f"{paths[index]}: the same run is given twice; name each run once")


def _check_comparable(first: Run, other: Run, allow: Sequence[str]) -> None:
    found = differences(to_dict(first.config), to_dict(other.config), fixed_in_comparisons(allow, type(first.config)))
    if found:
        changed = "; ".join(f"{name} ({a!r} and {b!r})" for name, (a, b) in found.items())
        raise UserError(
            f"{first.name} and {other.name} differ in more than attention: {changed}. Their difference would have more "
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


def _step_time_row(runs: Sequence[Run], path: pathlib.Path) -> Row:
    """The step times relative to the first run: median ratios of steps that ran in turn."""
    measured = read_step_times(path)
    folders = [str(pathlib.Path(run.name).resolve()) for run in runs]
    if list(measured["ratios"]) != folders:
        raise UserError(
            f"{path}: step times of {', '.join(measured['ratios'])}; expected those of {', '.join(folders)}. Run "
            f"python -m xsa_jax.train.step_time {' '.join(run.name for run in runs)} --output {path}"
        )
    for run, folder in zip(runs, folders, strict=True):
        if measured["configs"].get(folder) != digest(run.config):
            raise UserError(f"{path}: the step times of {run.name} were measured with another config; measure them again")
    return Row(f"step time over {_short_names(runs)[0]}'s, {measured['pairs']} pairs", list(measured["ratios"].values()), 3)


def _short_names(runs: Sequence[Run]) -> list[str]:
    """Names of the runs: the kinds of attention, such as "SA" and "XSA", if these are distinct; otherwise the folders."""
    kinds = [run.config.attention.kind.upper() for run in runs]
    return kinds if len(set(kinds)) == len(runs) else [run.name for run in runs]
