"""FLOPs of a train step, and the peak of the devices: what MFU and HFU are made of. docs/pods.md has the formula in words."""

from typing import NamedTuple

from xsa_jax.config import Config
from xsa_jax.parallel.chips import chip


class Flops(NamedTuple):
    """FLOPs of a train step per token.

    Attributes:
      model: those that the model needs, each computed once, for the MFU.
      hardware: those that the devices compute, for the HFU: also what the backward pass computes a second time.
    """

    model: float
    hardware: float


def train_flops_per_token(config: Config, batch_shards: int = 1) -> Flops:
    """FLOPs of the forward and backward pass per token, counted as in PaLM (arXiv 2204.02311, appendix B), but causally.

    A matrix weight counts 6 FLOPs. A key that a query sees counts 12 * H * E FLOPs per layer; on average a query sees (T + 1) / 2
    keys, and fewer with a window. SA and XSA count the same, so that their MFU is comparable: the projection costs no more than one
    more key. The second computation covers the scores of attention in its backward pass, what `model.remat` does not store, and the
    logits where the loss goes in chunks.

    Args:
      config: config of the run.
      batch_shards: number of devices that the rows of a batch are divided among; only `hardware` depends on it.
    """
    model, attention, seq_len = config.model, config.attention, config.data.seq_len
    query_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    qkv, out, down = model.d_model * (query_width + 2 * kv_width), model.d_model * query_width, model.d_model * model.d_ff
    up = down * (2 if model.mlp == "swiglu" else 1)
    head = model.d_model * model.vocab_size
    seen = min(seq_len, attention.window or seq_len)
    keys = seen - seen * (seen - 1) / (2 * seq_len)  # the mean of min(i, seen) over i = 1 .. T
    scores = query_width * keys  # multiplications in the product of queries and keys, and as many in that of weights and values
    needed = 6 * (model.num_layers * (qkv + out + up + down + 2 * scores) + head)
    # The backward pass needs no output of `down`: the next layer's input is stored.
    again = {"offload": up, "attention": qkv + out + up, "full": qkv + out + up + 2 * scores}.get(model.remat, 0)
    chunked = config.data.batch_size // batch_shards * seq_len > config.train.loss_chunk_tokens
    return Flops(needed, needed + 2 * (model.num_layers * (again + scores) + (head if chunked else 0)))


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for a compute type. None if the table lacks it, since no MFU is better than a guess."""
    found = chip(device_kind)
    return found.flops if found and dtype == "bfloat16" else None
