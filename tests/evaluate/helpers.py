"""A model that nobody trained, on a store small enough to go through token by token."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tests.data.helpers import text_store, words
from tests.helpers import mesh_of, model_of, random_params, tiny_config
from xsa_jax.evaluate.restore import Restored


def restored(folder: pathlib.Path, overrides: Mapping[str, Any] | None = None, **store: Any) -> Restored:
    """Random weights of a tiny XSA model for bytes, on one device, and a store with some hundred tokens, all held out."""
    config = tiny_config({"model.vocab_size": 260, "attention.kind": "xsa", **(overrides or {})})
    model = model_of(config)
    tokens = text_store(folder, words(6), validation_fraction=1.0, **store)
    return Restored(1, config, model, random_params(model), mesh_of(config), tokens)


def direct_nll(restored: Restored, context: int, tokens: int) -> np.ndarray:
    """Loss of every target, float64 [rows, T], one row at a time from whole logits; nan where the config leaves it out."""
    split, model = restored.store.split("validation"), restored.model
    isolate = restored.config.data.documents == "isolate"

    @jax.jit
    def logits(tokens_BT, segments_BT):
        transformer = model.bind(restored.params)
        return transformer.logits(transformer(tokens_BT, segments_BT if isolate else None)[0])

    rows = []
    for start in range(0, min(tokens, split.num_tokens - 1) // context * context, context):
        row = split.read(start, start + context + 1).astype(np.int32)
        first = np.zeros(context + 1, np.int32)
        first[split.starts(start + 1, start + context + 1) - start] = 1
        segments = np.cumsum(first, dtype=np.int32)
        scores = np.asarray(logits(row[None, :-1], segments[None, :-1]), np.float64)[0]
        nll = np.log(np.exp(scores).sum(-1)) - scores[np.arange(context), row[1:]]
        rows.append(np.where((segments[1:] != segments[:-1]) & isolate, np.nan, nll))
    return np.array(rows)
