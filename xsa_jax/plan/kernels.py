"""The cycles of the attention kernels on TPUs, from the stored count of their instruction bundles."""

import json
import math
import pathlib

from xsa_jax.errors import UserError
from xsa_jax.parallel.hlo import Kernel

STORED = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "tpu_bundles.json"
_CHIPS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
_KERNELS = {
    "xsa_forward": ("forward", "xsa"), "attention_forward": ("forward", "plain"),
    "xsa_backward": ("backward", "xsa"), "attention_backward": ("backward", "plain"),
}  # fmt: skip


def kernel_cycles(kernel: Kernel, device_kind: str) -> float:
    """Cycles of all runs of an attention kernel on one device: one per bundle, as if it never waited for memory.

    The bundles of each region of a kernel are stored for heads of 128 and blocks of 1024 tokens, for causal attention. Wider heads
    count in multiples of 128. A window is not regarded.

    Raises:
      UserError: no bundles are stored for this kernel or chip.
    """
    name, chip = _KERNELS.get(kernel.name), _CHIPS.get(device_kind)
    stored = json.loads(STORED.read_text())
    if name is None or chip not in stored["chips"]:
        raise UserError(
            f"kernel {kernel.name} on {device_kind}: {STORED.name} holds no bundles of it; see benchmarks/tpu_bundles.py"
        )
    direction, kind = name
    regions: dict[str, int] = stored["chips"][chip][direction][kind][kernel.name]
    B, H, T, E = kernel.shape
    n = math.ceil(T / stored["shape"]["block"])
    pairs = n * (n + 1) / 2
    often = {"step": pairs, "whole": pairs - n}  # once for each pair of blocks; the other regions once for each block of queries
    head = sum(bundles * often.get(region, n) for region, bundles in regions.items() if region != "weighted")
    short = min(1.0, T / stored["shape"]["block"]) ** 2
    return head * short * B * H * math.ceil(E / stored["shape"]["E"]) * kernel.times
