"""Each variant of the decoder: what it computes, what it may not see, what XSA leaves of a token's own value.

One compiled program per variant answers all of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tests.helpers import model_of, random_batch, random_params, tiny_config
from tests.model import oracle
from xsa_jax.config import Config
from xsa_jax.model.transformer import Params

XSA: dict[str, Any] = {"attention.kind": "xsa"}
MHA, MQA = {"attention.num_kv_heads": 4}, {"attention.num_kv_heads": 1}
DEEP = {"model.num_layers": 4}
EVERYTHING = {
    **XSA, **DEEP, "attention.xsa.layers": "0,2,3", "attention.xsa.strength": "learned", "attention.window": 6,
    "attention.sinks": True, "attention.logit_softcap": 2.0, "attention.qk_norm": True, "attention.value_residual": True,
    "model.logit_softcap": 3.0, "model.norm": "rmsnorm", "model.mlp": "swiglu", "model.tie_embeddings": False,
    "model.embed_norm": False, "model.remat": "full",
}  # fmt: skip

# Name -> what differs from the tiny config (which has grouped queries, two layers, float32), and the layers that project.
VARIANTS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "sa": ({}, set()),
    "sa-heads": (MHA, set()),
    "xsa": (XSA, {0, 1}),
    "heads": (XSA | MHA, {0, 1}),
    "one-kv-head": (XSA | MQA, {0, 1}),
    "first": (XSA | DEEP | {"attention.xsa.layers": "first:3"}, {0, 1, 2}),
    "last": (XSA | DEEP | {"attention.xsa.layers": "last:1"}, {3}),
    "every": (XSA | DEEP | {"attention.xsa.layers": "every:2"}, {1, 3}),
    "list": (XSA | DEEP | {"attention.xsa.layers": "0,3"}, {0, 3}),
    "fixed": (XSA | {"attention.xsa.strength": "fixed", "attention.xsa.alpha": 0.4}, {0, 1}),
    "learned": (XSA | {"attention.xsa.strength": "learned"}, {0, 1}),
    "add": (XSA | {"attention.xsa.zero_rule": "add", "attention.xsa.eps": 0.05}, {0, 1}),
    "clamp-often": (XSA | {"attention.xsa.eps": 8.0}, {0, 1}),
    "exact": (XSA | {"attention.xsa.zero_rule": "exact"}, {0, 1}),
    "window": (XSA | {"attention.window": 5}, {0, 1}),
    "window-of-one": (XSA | {"attention.window": 1}, {0, 1}),
    "sinks": (XSA | {"attention.sinks": True}, {0, 1}),
    "sa-sinks": ({"attention.sinks": True}, set()),
    "softcaps": (XSA | {"attention.logit_softcap": 1.5, "model.logit_softcap": 2.0}, {0, 1}),
    "qk-norm": (XSA | {"attention.qk_norm": True}, {0, 1}),
    "value-residual": (XSA | DEEP | {"attention.value_residual": True}, {0, 1, 2, 3}),
    "rope-base": (XSA | {"attention.rope_theta": 50.0}, {0, 1}),
    "llama": (XSA | {"model.norm": "rmsnorm", "model.mlp": "swiglu", "model.tie_embeddings": False}, {0, 1}),
    "no-embed-norm": (XSA | {"model.embed_norm": False}, {0, 1}),
    "remat-dots": (XSA | {"model.remat": "dots"}, {0, 1}),
    "remat-attention": (XSA | {"model.remat": "attention"}, {0, 1}),
    "reference": (XSA | {"attention.impl": "reference"}, {0, 1}),
    "bfloat16": (XSA | {"model.dtype": "bfloat16"}, {0, 1}),
    "everything": (EVERYTHING, {0, 2, 3}),
}
PARTIAL = {"fixed", "learned", "add", "clamp-often", "everything"}  # these leave some of the token's own value on purpose
FAST = {"sa", "xsa", "everything"}


class Compiled(NamedTuple):
    name: str
    config: Config
    projecting: set[int]
    params: Params
    run: Callable[..., tuple[np.ndarray, dict[str, np.ndarray]]]  # (tokens, segment ids) -> logits; q, v, z of every layer


def _seen(q_BTHE, _k, v_BTKE, z_BTHE, **_):
    return {"q": q_BTHE, "v": v_BTKE, "z": z_BTHE}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.fast] * (name in FAST)) for name in VARIANTS])
def variant(request) -> Compiled:
    overrides, projecting = VARIANTS[request.param]
    config = tiny_config({"data.documents": "isolate", **overrides})
    model = model_of(config)
    params = random_params(model)

    @jax.jit
    def program(params, tokens_BT, segments_BT):
        transformer = model.bind(params)
        hidden_BTD, stats = transformer(tokens_BT, segments_BT, probe=_seen)
        return transformer.logits(hidden_BTD), stats

    def run(tokens_BT, segments_BT):
        return jax.tree.map(lambda x: np.asarray(x, np.float32), program(params, tokens_BT, segments_BT))

    return Compiled(request.param, config, projecting, params, run)


def _three_documents(config: Config) -> tuple[np.ndarray, np.ndarray]:
    batch = random_batch(config, documents=3)
    return batch["tokens"][:, :-1], batch["segment_ids"][:, :-1]


def _same(variant: Compiled, actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, atol=0.1 if variant.name == "bfloat16" else 2e-5, rtol=0)


def test_equals_the_oracle(variant):
    tokens_BT, segments_BT = _three_documents(variant.config)
    logits_BTV, seen = variant.run(tokens_BT, segments_BT)
    expected = oracle.forward(variant.config, variant.projecting, variant.params, tokens_BT, segments_BT)
    _same(variant, logits_BTV, expected.logits_BTV)
    _same(variant, seen["v"], expected.v_LBTKE)
    _same(variant, seen["z"], expected.z_LBTHE)


def test_later_tokens_never_change_earlier_logits(variant):
    """Row r is row 0 with other tokens from position cut[r] on; once as one document, once as three."""
    _, segments_BT = _three_documents(variant.config)
    T, V = variant.config.data.seq_len, variant.config.model.vocab_size
    cuts = [T, 1, 2, 3, 5, 8, 12, 15]
    first_T = np.random.default_rng(1).integers(0, V, T, dtype=np.int32)
    tokens_BT = np.stack([np.where(np.arange(T) < cut, first_T, (first_T + 7) % V) for cut in cuts])
    for ids_T in (np.zeros(T, np.int32), segments_BT[0]):
        logits_BTV, _ = variant.run(tokens_BT, np.tile(ids_T, (len(cuts), 1)))
        for row, cut in enumerate(cuts[1:], 1):
            np.testing.assert_array_equal(logits_BTV[row, :cut], logits_BTV[0, :cut])
            assert np.abs(logits_BTV[row, cut] - logits_BTV[0, cut]).max() > 0.01  # the change was one that shows


def test_packed_documents_do_not_see_each_other(variant):
    """Document b behind another one in rows 0, 1 and 2, and alone at the start of row 3."""
    T, V = variant.config.data.seq_len, variant.config.model.vocab_size
    a, b = 7, T - 7
    rng = np.random.default_rng(2)
    document_b = rng.integers(0, V, b, dtype=np.int32)
    tokens_BT = rng.integers(0, V, (8, T), dtype=np.int32)
    segments_BT = np.full((8, T), 5, np.int32)
    tokens_BT[:3, a:], segments_BT[:2, a:] = document_b, 6
    tokens_BT[3, :b], segments_BT[3, b:] = document_b, 9
    logits_BTV, seen = variant.run(tokens_BT, segments_BT)
    np.testing.assert_array_equal(logits_BTV[0, a:], logits_BTV[1, a:])
    _same(variant, seen["q"][0, 0, a:], seen["q"][0, 3, :b])  # turned by the same positions: they restart with the document
    _same(variant, logits_BTV[0, a:], logits_BTV[3, :b])  # its sums run over the same numbers in another order
    if variant.config.attention.window != 1:
        assert np.abs(logits_BTV[0, a:] - logits_BTV[2, a:]).max() > 0.01  # without a border between them it shows


def test_what_projection_leaves(variant):
    """Full strength: nothing along the token's own value, so nothing at all where a token has only itself to attend to."""
    attention = variant.config.attention
    tokens_BT, segments_BT = _three_documents(variant.config)
    _, seen = variant.run(tokens_BT, segments_BT)
    v_LBTKE, z_LBTHE = seen["v"], seen["z"]
    own_LBTHE = np.repeat(v_LBTKE, attention.num_heads // attention.num_kv_heads, axis=3)
    along_LBTH = np.abs(np.sum(own_LBTHE * z_LBTHE, -1)) / np.linalg.norm(own_LBTHE, axis=-1)
    starts_BT = np.diff(segments_BT, axis=1, prepend=0) != 0
    limit = 0.03 if variant.name == "bfloat16" else 1e-5
    for layer in range(variant.config.model.num_layers):
        if layer not in variant.projecting or variant.name in PARTIAL:
            assert along_LBTH[layer].max() > 0.03
            continue
        assert along_LBTH[layer].max() < limit
        alone_BT = np.ones_like(starts_BT) if attention.window == 1 else starts_BT
        assert np.abs(z_LBTHE[layer][alone_BT]).max() < limit
        assert alone_BT.all() or np.abs(z_LBTHE[layer]).max() > 0.1  # something is left to be orthogonal


@pytest.mark.parametrize("name", ["sa", "xsa", "window", "everything"])
def test_one_document_needs_no_segment_ids(name):
    overrides, projecting = VARIANTS[name]
    config = tiny_config(overrides)
    model = model_of(config)
    params = random_params(model)
    tokens_BT, _ = _three_documents(config)

    @jax.jit
    def program(params, tokens_BT):
        transformer = model.bind(params)
        return transformer.logits(transformer(tokens_BT)[0])

    expected = oracle.forward(config, projecting, params, tokens_BT)
    np.testing.assert_allclose(program(params, tokens_BT), expected.logits_BTV, atol=2e-5, rtol=0)
