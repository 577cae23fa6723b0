"""Labels of an evaluation's measurements, shared by tables and plots."""

from collections.abc import Mapping
from typing import Any

# The statistics of `xsa_jax.evaluate.similarity`. No label holds a "|", which would end a cell of a markdown table.
STATISTICS = {
    "value_cosine": "cos(v_i,v_j)", "self_weight": "a_ii", "cosine": "cos(y,v)", "cosine_xsa": "cos(z,v)",
    "centred_cosine": "centred cos(y,v)", "centred_cosine_xsa": "centred cos(z,v)", "removed": "removed",
}  # fmt: skip

LEGEND = "v: a token's own value; a_ii: its attention to itself; y: what attention returns; z: y after XSA; removed: |y - z| / |y|."


def positions(bucket: Mapping[str, Any]) -> str:
    """Label of the positions of a bucket, such as "0" or "16-31"; the bucket holds "start" and an exclusive "stop"."""
    start, stop = bucket["start"], bucket["stop"]
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"
