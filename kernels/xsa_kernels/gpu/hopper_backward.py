"""The backward pass for Hopper chips: two kernels in the manner of `hopper`, which both recompute the weights from q, k and lse."""

import dataclasses

import jax.numpy as jnp

from xsa_kernels.backend import Gradients, Outputs, RowGradients
from xsa_kernels.gpu import hopper_dkv, hopper_dq
from xsa_kernels.gpu import hopper_tile as tile
from xsa_kernels.gpu.hopper_tile import COMPUTE_WARPGROUPS, ROWS
from xsa_kernels.gpu.spans import BlockGrid
from xsa_kernels.request import Request


def backward_main(request: Request, outputs: Outputs, rows: RowGradients, *, interpret: bool) -> Gradients:
    """The protocol `backend.BackwardMain`."""
    keeps_diagonal = None if rows.keeps_diagonal_BKT is None else rows.keeps_diagonal_BKT.astype(jnp.float32)
    inputs = {
        # q and dy are zero beyond their ends, so those rows add nothing.
        "q": tile.copyable(request.q_BTHE),
        "k": tile.copyable(request.k_BSKE),
        "v": tile.copyable(request.v_BSKE),
        "dy": tile.copyable(rows.dy_BTHE),
        "lse": tile.padded(outputs.lse_BHT, 2),
        "delta": tile.padded(rows.delta_BHT, 2),
        "keeps_diagonal": tile.padded(keeps_diagonal, 2),
    }
    dq_grid = BlockGrid.of(request, COMPUTE_WARPGROUPS * ROWS, hopper_dq.KEYS)
    dkv_grid = dataclasses.replace(dq_grid, block_t=ROWS, block_s=COMPUTE_WARPGROUPS * ROWS)
    dq_segments = tile.segment_inputs(dq_grid, request.segment_ids_BS, of_keys=False)
    dkv_segments = tile.segment_inputs(dkv_grid, request.segment_ids_BS, of_keys=True)
    dq = hopper_dq.launch(dq_grid, inputs | dq_segments, interpret)
    dk, dv = hopper_dkv.launch(dkv_grid, inputs | {"dv_start": tile.padded(rows.dv_start_BTKE, 1)} | dkv_segments, interpret)
    return Gradients(dq[:, : dq_grid.T], dk[:, : dq_grid.S], dv[:, : dq_grid.S])
