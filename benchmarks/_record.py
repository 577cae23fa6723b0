"""The record of a benchmark: its rows, and the machine, versions, command and date that produced them."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import sys
from typing import Any

import jax

REPO = pathlib.Path(__file__).resolve().parents[1]


def write(path: str | None, benchmark: str, rows: list[dict[str, Any]]) -> None:
    """Writes the rows as JSON with the machine, versions, command and date. Without a path it does nothing."""
    if path is None:
        return
    versions = {}
    for name in ("jax", "jaxlib", "flax", "optax"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    record = {
        "benchmark": benchmark,
        "command": " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "versions": versions,
        "rows": rows,
    }
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_text(json.dumps(record, indent=1) + "\n")


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """The rows as a markdown table. Numbers have four significant digits."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in (row.get(c, "") for c in columns)] for row in rows]
    lines = ["| " + " | ".join(line) + " |" for line in [columns, *cells]]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])
