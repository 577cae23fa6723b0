"""Plots of runs and comparisons, as PNG files."""

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from xsa_jax import files
from xsa_jax.labels import STATISTICS, positions

# The palette of Okabe and Ito, which any colour vision can distinguish. Line styles and markers distinguish the runs, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25, "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 4,
}  # fmt: skip

Records = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


def loss_curves(runs: Mapping[str, Records], path: pathlib.Path) -> None:
    """Plots losses by step.

    Left: training loss (faint) and validation loss (marked) of each run. Right: losses of the first run minus those of each other
    run, at steps that both logged. The difference of training losses is a running mean over a tenth of the run.

    Args:
      runs: records of each run by name, as in metrics.jsonl.
      path: PNG file to write.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for index, (name, records) in enumerate(runs.items()):
            steps, losses = _curve(records, "train")
            left.plot(steps, losses, color=_COLOURS[index % 6], alpha=0.35, linewidth=1)
            left.plot(*_curve(records, "validation"), color=_COLOURS[index % 6], marker=_MARKERS[index % 6], label=name)
        left.set(title="loss (faint: training, marked: validation)", xlabel="step", ylabel="nats per token")
        validation = np.concatenate([_curve(records, "validation")[1] for records in runs.values()])
        if len(validation):  # the range of validation losses: training losses of the first steps would flatten the curves
            low, high = validation.min(), validation.max()
            left.set_ylim(low - 0.25 * (high - low) - 0.02, high + 0.6 * (high - low) + 0.02)
        left.set_xlim(left=0)
        left.legend()

        first, *others = runs
        for index, name in enumerate(others, start=1):
            colour, marker = _COLOURS[index % 6], _MARKERS[index % 6]
            steps, difference = _difference(runs[first], runs[name], "train")
            window = max(1, len(steps) // 10)
            sums = np.cumsum([0.0, *difference])
            smooth = (sums[window:] - sums[:-window]) / window
            right.plot(steps[window - 1 :], smooth, color=colour, alpha=0.5, linewidth=1, label="training, running mean")
            steps, difference = _difference(runs[first], runs[name], "validation")
            label = "validation" if len(others) == 1 else f"validation, {name}"
            right.plot(steps, difference, color=colour, marker=marker, label=label)
        right.axhline(0, color="black", linewidth=0.8)
        title = f"{first} - {others[0]}" if len(others) == 1 else f"{first} - other"
        right.set(title=f"loss difference, {title} (above 0: {first} is worse)", xlabel="step", ylabel="nats per token")
        right.set_xlim(left=0)
        right.legend()
        _save(figure, path)


def buckets(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: pathlib.Path) -> None:
    """Plots the loss of the first run minus that of each other run, by position in the context.

    Args:
      runs: "buckets" of each run's evaluation, by name of the run.
      path: PNG file to write.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 3), layout="constrained")
        axes = figure.subplots()
        first, *others = runs
        width = 0.8 / len(others)
        for index, name in enumerate(others):
            differences = _losses(runs[first]) - _losses(runs[name])
            places = np.arange(len(differences)) + (index - (len(others) - 1) / 2) * width
            axes.bar(places, differences, width, color=_COLOURS[(index + 1) % 6], label=name)
        labels = [f"{positions(bucket)}\n{bucket['tokens']:,}" for bucket in runs[first]]
        axes.set_xticks(range(len(labels)), labels)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="x", visible=False)
        title = f"validation loss by position, {first} - {others[0] if len(others) == 1 else 'other'}"
        axes.set(
            title=f"{title} (above 0: {first} is worse)",
            xlabel="position in the context, and tokens counted there",
            ylabel="nats per token",
        )
        if len(others) > 1:
            axes.legend()
        _save(figure, path)


def similarity(runs: Mapping[str, Mapping[str, Any]], path: pathlib.Path) -> None:
    """Plots the similarity statistics by layer.

    The four panels show cos(v_i, v_j), a_ii, and the raw and the centred cosine between the output of attention and the token's
    value, before (solid) and after (dashed) XSA. Lines are means over heads, and a faint band spans the heads.

    Args:
      runs: "similarity" of each run's evaluation, by name of the run.
      path: PNG file to write.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 5), layout="constrained")
        panels = figure.subplots(2, 2)
        _panel(panels[0, 0], runs, f"{STATISTICS['value_cosine']}, pairs of tokens", "value_cosine")
        _panel(panels[0, 1], runs, f"{STATISTICS['self_weight']}, weight on oneself", "self_weight")
        title = f"{STATISTICS['cosine']}; dashed: {STATISTICS['cosine_xsa']}, after XSA"
        _panel(panels[1, 0], runs, title, "cosine", "cosine_xsa")
        _panel(panels[1, 1], runs, "the same, centred", "centred_cosine", "centred_cosine_xsa")
        for axes in panels[1]:
            axes.set_xlabel("layer")
        figure.legend(*panels[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        _save(figure, path)


def _panel(axes, runs: Mapping[str, Mapping[str, Any]], title: str, before: str, after: str | None = None) -> None:
    for index, (name, statistics) in enumerate(runs.items()):
        colour, marker = _COLOURS[index % 6], _MARKERS[index % 6]
        lines = [(before, "-", name)]
        if after is not None and np.max(np.array(statistics["removed"], dtype=float)) > 1e-3:
            lines.append((after, "--", f"{name}, after"))  # without XSA both lines would coincide
        for statistic, style, label in lines:
            values_LH = np.array(statistics[statistic], dtype=float)
            layer = np.arange(len(values_LH))
            axes.plot(layer, values_LH.mean(axis=1), linestyle=style, marker=marker, color=colour, label=label)
            axes.fill_between(layer, values_LH.min(axis=1), values_LH.max(axis=1), color=colour, alpha=0.1, linewidth=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_title(title)


def _losses(loss_buckets: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([bucket["loss"] for bucket in loss_buckets], dtype=float)  # null (no counted token) becomes nan


def _curve(records: Records, split: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(record["step"], record["loss"]) for record in records if record["split"] == split]
    steps, losses = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, losses


def _difference(first: Records, other: Records, split: str) -> tuple[np.ndarray, np.ndarray]:
    (a_steps, a), (b_steps, b) = _curve(first, split), _curve(other, split)
    steps, in_a, in_b = np.intersect1d(a_steps, b_steps, return_indices=True)
    return steps, a[in_a] - b[in_b]


def _save(figure: Figure, path: pathlib.Path) -> None:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    files.write_bytes(path, png.getvalue())
