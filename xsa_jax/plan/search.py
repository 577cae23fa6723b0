"""Which meshes and policies of recomputation make the fastest step that fits?"""

import concurrent.futures
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xsa_jax.config import Config
from xsa_jax.errors import UserError
from xsa_jax.parallel.devices import default_fsdp
from xsa_jax.plan.topology import chip_of, devices_of

_MOST_PLANS = 10


class Candidate(NamedTuple):
    """One combination to plan."""

    fsdp: int
    remat: str

    @property
    def flags(self) -> list[str]:
        """The flags that set it."""
        return ["--config.mesh.data=-1", f"--config.mesh.fsdp={self.fsdp}", f"--config.model.remat={self.remat}"]


def candidates(config: Config, devices: int, memory: float, default: int) -> list[Candidate]:
    """The combinations to plan: numbers of fsdp shards, the nearest to the default first, each with two policies that may fit.

    Args:
      config: config of the run.
      devices: number of devices that data and fsdp are to use.
      memory: bytes of memory of a device.
      default: number of fsdp shards that a run has by default.
    """
    may_fit = list(_that_may_fit(config, devices, memory))
    sizes = sorted({c.fsdp for c in may_fit}, key=lambda fsdp: abs(math.log2(fsdp / default)))
    return [c for fsdp in sizes for c in [c for c in may_fit if c.fsdp == fsdp][:2]][:_MOST_PLANS]


def search(config: Config, topology: str, arguments: Sequence[str]) -> str:
    """Plans the candidates, several at a time, and returns a ranking of those that fit.

    Args:
      config: config of the run.
      topology: name of the devices.
      arguments: flags that describe the run, for `python -m xsa_jax.plan`.

    Raises:
      UserError: nothing fits, or no step is predicted for these devices.
    """
    devices = devices_of(topology)
    stated = chip_of(devices)
    if devices[0].platform == "tpu" and stated.clock is None:
        raise UserError(f"--search: steps on {topology} are not predicted, since the clock of this chip is not published")
    default = default_fsdp(devices, config.mesh.tensor, math.gcd(config.data.batch_size, config.model.d_model))
    found = candidates(config, len(devices) // config.mesh.tensor, stated.memory, default)

    def planned(candidate: Candidate) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "plan.json"
            flags = [*arguments, *candidate.flags, "--nosearch", f"--json={path}"]  # the last of equal flags counts
            done = subprocess.run([sys.executable, "-m", "xsa_jax.plan", *flags], capture_output=True, text=True)
            last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            return json.loads(path.read_text()) if path.exists() else {"error": last_line}

    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        plans = list(zip(found, pool.map(planned, found), strict=True))
    if all("error" in plan for _, plan in plans):
        reasons = "".join(f"; fsdp={c.fsdp}, remat={c.remat}: {plan['error'][:160]}" for c, plan in plans)
        raise UserError(f"nothing fits {topology}, or no mesh divides the batch and the width{reasons}")
    return _ranking(plans)


def _ranking(plans: Sequence[tuple[Candidate, dict[str, Any]]]) -> str:
    lines = [f"{'data':>5} {'fsdp':>5} {'tensor':>6} {'remat':10} {'step':>10} {'MFU':>6} {'GiB':>6}"]
    for _, plan in sorted((pair for pair in plans if "error" not in pair[1]), key=lambda pair: pair[1]["step"]):
        mesh, milliseconds, gib = plan["mesh"], 1e3 * plan["step"], plan["memory"]["needed"] / 2**30
        lines.append(
            f"{mesh['data']:5} {mesh['fsdp']:5} {mesh['tensor']:6} {plan['remat']:10} {milliseconds:7.1f} ms "
            f"{100 * plan['mfu']:5.1f}% {gib:6.2f}"
        )
    for candidate, plan in plans:
        if "error" in plan:
            lines.append(f"not planned: fsdp={candidate.fsdp}, remat={candidate.remat}: {plan['error'][:160]}")
    return "\n".join(lines)


def _that_may_fit(config: Config, devices: int, memory: float) -> Iterator[Candidate]:
    model, data = config.model, config.data
    width = config.attention.num_heads * config.attention.head_dim
    weights = model.num_layers * (4 * model.d_model * width + 2 * model.d_model * model.d_ff) + model.vocab_size * model.d_model
    tokens = data.batch_size * data.seq_len / devices
    # Stored activations of a layer in widths per token; a rough figure, which decides what is compiled and not what fits.
    mlp = model.d_ff / model.d_model
    stored = {"none": 16 + 3 * mlp, "dots": 8 + mlp, "attention": 2, "full": 1}
    size = 2 if model.dtype == "bfloat16" else 4
    fsdp = 1
    while fsdp <= devices:
        divides = devices % fsdp == 0 and model.d_model % fsdp == 0 and data.batch_size % devices == 0
        for remat, widths in stored.items():
            needed = 12 * weights / fsdp + tokens * model.num_layers * widths * model.d_model * size
            if divides and needed < memory:
                yield Candidate(fsdp, remat)
        fsdp *= 2
