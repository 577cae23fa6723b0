"""Validation loss of a restored model at any context length, by position in the context."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xsa_jax.data.loader import Loader
from xsa_jax.evaluate.restore import Restored
from xsa_jax.parallel.mesh import batch_rows
from xsa_jax.progress import Progress
from xsa_jax.train.validate import PositionSums, make_evaluator, validate

# Batch size: large enough to keep an accelerator busy, and small enough for any accelerator that holds the model.
_TOKENS_PER_DEVICE = 16_384


def buckets(context: int) -> list[tuple[int, int]]:
    """Ranges of positions [start, stop): 0, 1, 2-3, 4-7, and so on, doubling up to the context length.

    The loss falls by about the same amount with each doubling of the context, so it falls evenly from bucket to bucket. Position 0
    is a bucket of its own because a token there attends only to itself: SA returns the token's value, and XSA returns zero.
    """
    edges = [0] + [2**i for i in range(context.bit_length()) if 2**i < context] + [context]
    return list(itertools.pairwise(edges))


def position_sums(restored: Restored, context: int, tokens: int) -> PositionSums:
    """Sums of the loss over held-out text, by position in rows of `context` tokens.

    Every context length reads the same text, except for the remainder that fills no row, in batches of about the same number of
    tokens. Positions count from the start of the row, even where documents are isolated.

    Args:
      restored: the model, and the token store to read.
      context: context length, in tokens.
      tokens: number of held-out tokens to read, rounded down to whole rows, but at least one row.

    Raises:
      UserError: the validation split is shorter than one row.
    """
    batch_size = restored.mesh.size * max(1, _TOKENS_PER_DEVICE // context)
    rows = batch_rows(restored.mesh, batch_size)
    loader = restored.held_out(context, batch_size, max(1, tokens // context), rows)
    evaluator = make_evaluator(restored.model, restored.config.train.loss_chunk_tokens)
    with jax.set_mesh(restored.mesh):
        return validate(evaluator, restored.params, _shown(loader, context), len(rows), restored.mesh)


def _shown(loader: Loader, context: int) -> Iterator[Mapping[str, np.ndarray]]:
    """The loader's batches, with their progress for people who wait."""
    with contextlib.closing(Progress(loader.num_rows, unit="row")) as progress:
        done = 0
        for batch in loader.iterate():
            yield batch
            done += len(batch["tokens"])
            progress.update(done, f"context {context}", f"eval: context {context}, {done:,} of {loader.num_rows:,} rows")


def losses(restored: Restored, contexts: Sequence[int], tokens: int) -> list[dict[str, Any]]:
    """The loss `summary` of each distinct context length, in the order given.

    Args:
      restored: the model, and the token store to read.
      contexts: context lengths, in tokens.
      tokens: number of held-out tokens to read at each context length.

    Raises:
      UserError: the validation split is shorter than one row.
    """
    bytes_per_token = restored.store.split("validation").bytes_per_token
    return [summary(position_sums(restored, context, tokens), bytes_per_token) for context in dict.fromkeys(contexts)]


def summary(sums: PositionSums, bytes_per_token: float) -> dict[str, Any]:
    """A loss as plain values: "context", the values of `PositionSums.totals`, and "buckets" of {"start", "stop", "loss", "tokens"}.

    Bits per byte use the mean bytes per token of the whole split, end-of-text tokens included. They approximate the bits that the
    text takes, because some tokens are never scored although their bytes count: the first token of the split, the remainder that
    fills no row and, where documents are isolated, the first token of each document.
    """
    context = len(sums.nll_T)
    by_position = [
        {"start": start, "stop": stop, "loss": sums.loss(start, stop), "tokens": int(sums.tokens_T[start:stop].sum())}
        for start, stop in buckets(context)
    ]
    return {"context": context, **sums.totals(bytes_per_token), "buckets": by_position}
