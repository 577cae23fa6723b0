"""Validation loss of a restored model, by position in the context, at any context length."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from xsa_jax.evaluate.restore import Restored
from xsa_jax.train.validate import PositionSums, make_evaluator, validate

# Enough to keep an accelerator busy, little enough for any that holds the model: evaluation needs no larger batch.
_TOKENS_PER_DEVICE = 16_384


def buckets(context: int) -> list[tuple[int, int]]:
    """Ranges of positions [start, stop): 0 alone, then 1, 2-3, 4-7, ... doubling up to the context.

    Loss falls about evenly with each doubling of the context, so each bucket is one step of that fall. Position 0 stands
    alone because attention has nothing to look at there: SA returns the own value, XSA returns zero.
    """
    edges = [0] + [2**i for i in range(context.bit_length()) if 2**i < context] + [context]
    return list(itertools.pairwise(edges))


def position_sums(restored: Restored, context: int, tokens: int) -> PositionSums:
    """Loss over the first `tokens` held-out tokens (at least one row), cut into rows of `context`.

    Every context length reads the same text, the rest of a last incomplete row apart, and about the same number of tokens
    at a time. Where the model keeps documents apart, "position" still counts from the start of the row.

    Raises:
      UserError: the validation split is shorter than one row.
    """
    config = restored.config
    rows = restored.mesh.size * max(1, _TOKENS_PER_DEVICE // context)
    loader = restored.held_out(context, rows, max(1, tokens // context))
    # As many logits at a time as in training, whatever the number of rows.
    chunk = max(1, config.train.loss_chunk * context // config.data.seq_len)
    evaluator = make_evaluator(restored.model, chunk)
    with jax.set_mesh(restored.mesh):
        return validate(evaluator, restored.params, loader.iterate(), rows, restored.mesh)


def losses(restored: Restored, contexts: Sequence[int], tokens: int) -> list[dict[str, Any]]:
    """`summary` of each context length, each once, in the order given."""
    bytes_per_token = restored.store.split("validation").bytes_per_token
    return [summary(position_sums(restored, context, tokens), bytes_per_token) for context in dict.fromkeys(contexts)]


def summary(sums: PositionSums, bytes_per_token: float) -> dict[str, Any]:
    """Plain values: "context", the totals of `PositionSums.totals`, and "buckets" of {"start", "stop", "loss", "tokens"}.

    Bits per byte use the mean bytes per token of the whole split, end-of-text tokens counted in. They are close to the bits
    that the text takes, never exactly those: the first token of the split and the rest of a last incomplete row are never
    scored, nor, where documents are kept apart, the first token of each; their bytes count all the same.
    """
    context = len(sums.nll_T)
    by_position = [
        {"start": start, "stop": stop, "loss": sums.loss(start, stop), "tokens": int(sums.tokens_T[start:stop].sum())}
        for start, stop in buckets(context)
    ]
    return {"context": context, **sums.totals(bytes_per_token), "buckets": by_position}
