"""How much lower is the loss with XSA at the paper's sizes? The argument of this file is the size: 0p7b, 1p3b or 2p7b.

Command: python train.py --config configs/paper.py:0p7b --workdir runs/xsa_0p7b --config.attention.kind=xsa
         and the same with --workdir runs/sa_0p7b --config.attention.kind=sa
Result: not yet measured.

The paper (arXiv 2603.09078) states: 24, 24 and 32 layers, context 2048, about 0.5M tokens per step, 200K steps, AdamW with cosine
decay, and a norm after the embedding. It does not state the rest. Here, width, feed-forward and learning rates follow the GPT-3
models of similar size (arXiv 2005.14165, table 2.1), and the vocabulary is GPT-2's, padded to 50304. Heads are 128 wide at every
size, as many as fill the width, because the matrix units and lanes of today's chips are 128 wide and pad narrower heads. Warm-up,
betas, weight decay, clipping, initialisation and tied embeddings are our choice too.
"""

from typing import TYPE_CHECKING, Any

from xsa_jax.config import config_dict
from xsa_jax.errors import ConfigError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

# size: (layers, width, heads, head width, peak learning rate)
SIZES = {
    "0p7b": (24, 1536, 12, 128, 2.5e-4),
    "1p3b": (24, 2048, 16, 128, 2.0e-4),
    "2p7b": (32, 2560, 20, 128, 1.6e-4),
}


def overrides(size: str) -> dict[str, Any]:
    """The values that differ from the defaults, by dotted field name.

    Raises:
      ConfigError: the size is unknown.
    """
    if size not in SIZES:
        raise ConfigError(f"configs/paper.py: found size {size!r}, expected configs/paper.py:SIZE with one of {', '.join(SIZES)}")
    num_layers, d_model, num_heads, head_dim, peak_lr = SIZES[size]
    return {
        "model.num_layers": num_layers, "model.d_model": d_model, "model.d_ff": 4 * d_model, "model.remat": "auto",
        "attention.num_heads": num_heads, "attention.num_kv_heads": num_heads, "attention.head_dim": head_dim,
        "data.seq_len": 2048, "data.batch_size": 256,  # 524,288 tokens per step
        "optim.peak_lr": peak_lr, "optim.warmup_steps": 2000,
        "train.num_steps": 200_000, "train.loss_chunk_tokens": 8192,
    }  # fmt: skip


def get_config(size: str = "") -> "ConfigDict":
    """The config of one size, "0p7b", "1p3b" or "2p7b"."""
    config = config_dict()
    config.update_from_flattened_dict(overrides(size))
    return config
