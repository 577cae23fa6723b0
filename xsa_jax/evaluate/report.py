"""The result of an evaluation, as printed tables and as a JSON file."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xsa_jax.config.stored import to_stored
from xsa_jax.errors import UserError
from xsa_jax.evaluate.restore import Restored
from xsa_jax.files import write_json
from xsa_jax.labels import LEGEND, STATISTICS, positions
from xsa_jax.parallel.mesh import describe


def contexts(given: Sequence[str]) -> list[int]:
    """Parses the context lengths of the flag --contexts.

    Raises:
      UserError: an item is not a positive number.
    """
    for item in given:
        if not item.isdecimal() or int(item) < 1:
            raise UserError(f"--contexts: found {item!r}, expected positive numbers such as --contexts=512,4096")
    return [int(item) for item in given]


def header(run: str, restored: Restored) -> dict[str, Any]:
    """The run, step, config, devices and token store of an evaluation, as plain values."""
    store = restored.store
    return {
        "run": run,
        "step": restored.step,
        "config": to_stored(restored.config),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(restored.params)),
        "devices": describe(list(restored.mesh.devices.flat)),
        "store": {
            "path": str(store.path),
            "hash": store.hash,
            "tokenizer": store.tokenizer_name,
            "bytes_per_token": store.split("validation").bytes_per_token,
        },
    }


def text(result: Mapping[str, Any]) -> str:
    """The printed tables of one evaluation. `result` is what `eval.py` writes; it may hold arrays or lists."""
    parts = [_title(result), _losses(result["losses"]), _positions(result["losses"][0]), _similarity(result["similarity"])]
    for sample in result["samples"]:
        parts.append(f"sample, {sample['prompt']!r} and on:\n{_indented(sample['text'])}")
    return "\n\n".join(parts)


def write(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes the JSON file atomically, with null for nan and infinity.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _plain(result))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _grid(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns. The first column is left-aligned, and the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    )


def _title(result: Mapping[str, Any]) -> str:
    store = result["store"]
    return (
        f"{result['run']} at step {result['step']}: attention.kind={result['config']['attention']['kind']}, "
        f"{result['parameters']:,} parameters\n"
        f"validation text of {store['path']}, tokenizer {store['tokenizer']}, {store['bytes_per_token']:.3f} bytes per token"
    )


def _losses(losses: Sequence[Mapping[str, Any]]) -> str:
    rows = [["context", "nats/token", "bits/byte", "perplexity", "tokens"]]
    for index, loss in enumerate(losses):
        rows.append([
            f"{loss['context']}{' (trained)' if index == 0 else ''}", f"{loss['loss']:.4f}", f"{loss['bits_per_byte']:.4f}",
            f"{loss['perplexity']:.2f}", f"{loss['tokens']:,}",
        ])  # fmt: skip
    return _grid(rows)


def _positions(loss: Mapping[str, Any]) -> str:
    rows = [["position", "nats/token", "tokens"]]
    rows += [[positions(bucket), f"{bucket['loss']:.4f}", f"{bucket['tokens']:,}"] for bucket in loss["buckets"]]
    return _grid(list(zip(*rows, strict=True)))


def _similarity(similarity: Mapping[str, Any]) -> str:
    per_layer = {name: np.mean(similarity[name], axis=1) for name in STATISTICS}
    rows = [["layer", *STATISTICS.values()]]
    for layer in range(len(per_layer["cosine"])):
        rows.append([str(layer), *(f"{values[layer]:.4f}" for values in per_layer.values())])
    rows.append(["mean", *(f"{values.mean():.4f}" for values in per_layer.values())])
    return f"{_grid(rows)}\n{LEGEND}"


def _indented(sample: str) -> str:
    return "\n".join("    " + line for line in sample.splitlines())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
