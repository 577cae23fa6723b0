"""Similarity against a float64 double loop that knows nothing of running sums, chunks or grouped heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsa_kernels
from tests.helpers import model_of, random_batch, tiny_config
from xsa_jax.evaluate.similarity import probe, similarity

NAMES = ("value_cosine", "self_weight", "cosine", "cosine_xsa", "centred_cosine", "centred_cosine_xsa", "removed")
PLAIN = {"mask": xsa_kernels.MaskSpec(), "sinks_H": None, "softcap": None}
CASES = {
    "xsa": {"attention.kind": "xsa"},
    "documents, sinks": {"data.documents": "isolate", "attention.sinks": True},
    "window, multi-query, soft-cap": {
        "attention.kind": "xsa", "attention.window": 3, "attention.num_kv_heads": 1, "attention.logit_softcap": 2.0,
    },
    "half of the last layer": {
        "attention.kind": "xsa", "attention.xsa.layers": "1", "attention.xsa.strength": "fixed", "attention.xsa.alpha": 0.5,
        "data.documents": "isolate", "attention.window": 4, "attention.value_residual": True,
    },
}  # fmt: skip


def weights_of(config):
    params = model_of(config).init(jax.random.key(3))
    if config.attention.sinks:
        sinks = np.random.default_rng(0).normal(size=(2, config.attention.num_heads)).astype(np.float32)
        params["blocks"]["attention"]["sinks"] = sinks
    params["blocks"]["attention"]["q"] *= 2.0  # sharper attention, so that a_ii and the cosines differ from head to head
    return params


def captured(config, params, batch):
    """q, k, v, z of every layer, float64, as the model made them."""
    model = model_of(config)

    def keep(q, k, v, z, *, mask, sinks_H, softcap):
        return {"q": q, "k": k, "v": v, "z": z}

    segments = batch["segment_ids"][:, :-1] if "segment_ids" in batch else None
    run = jax.jit(lambda params, tokens: model.bind(params)(tokens, segments, probe=keep)[1])
    return {name: np.asarray(x, np.float64) for name, x in run(params, batch["tokens"][:, :-1]).items()}


def by_double_loop(config, params, batch):
    attention, (rows, length) = config.attention, batch["tokens"][:, :-1].shape
    H, group = attention.num_heads, attention.num_heads // attention.num_kv_heads
    segments = batch.get("segment_ids", np.zeros_like(batch["tokens"]))
    data = captured(config, params, batch)
    window = attention.window or length

    def cosine(x, y):
        return x @ y / np.linalg.norm(x) / np.linalg.norm(y)

    result = {name: np.zeros((config.model.num_layers, H)) for name in NAMES}
    for layer in range(config.model.num_layers):
        for h in range(H):
            pairs, selves, ys, zs, vs = [], [], [], [], []
            for b in range(rows):
                q, z = data["q"][layer, b, :, h], data["z"][layer, b, :, h]
                k, v = data["k"][layer, b, :, h // group], data["v"][layer, b, :, h // group]
                for i in range(length):
                    seen = [j for j in range(i + 1) if segments[b, j] == segments[b, i] and i - j < window]
                    scores = np.array([q[i] @ k[j] / np.sqrt(q.shape[1]) for j in seen])
                    if attention.logit_softcap:
                        scores = attention.logit_softcap * np.tanh(scores / attention.logit_softcap)
                    total = np.exp(scores).sum()
                    if attention.sinks:
                        total += np.exp(np.float64(params["blocks"]["attention"]["sinks"][layer, h]))
                    a = np.exp(scores) / total
                    pairs += [cosine(v[i], v[j]) for j in seen[:-1]]
                    if len(seen) > 1:
                        selves.append(a[-1])
                        ys.append(sum(a[n] * v[j] for n, j in enumerate(seen)))
                        zs.append(z[i])
                        vs.append(v[i])
            ys, zs, vs = np.array(ys), np.array(zs), np.array(vs)
            centre = [x - x.mean(0) for x in (ys, zs, vs)]
            result["value_cosine"][layer, h] = np.mean(pairs)
            result["self_weight"][layer, h] = np.mean(selves)
            result["cosine"][layer, h] = np.mean([cosine(y, v) for y, v in zip(ys, vs, strict=True)])
            result["cosine_xsa"][layer, h] = np.mean([cosine(z, v) for z, v in zip(zs, vs, strict=True)])
            result["centred_cosine"][layer, h] = np.mean([cosine(y, v) for y, v in zip(centre[0], centre[2], strict=True)])
            result["centred_cosine_xsa"][layer, h] = np.mean([cosine(z, v) for z, v in zip(centre[1], centre[2], strict=True)])
            result["removed"][layer, h] = np.mean(np.linalg.norm(ys - zs, axis=1) / np.linalg.norm(ys, axis=1))
    return result


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.fast if name == "xsa" else ()) for name in CASES])
def test_equals_the_double_loop(case):
    config = tiny_config({**CASES[case], "data.batch_size": 2, "data.seq_len": 12})
    batch = random_batch(config, documents=3 if config.data.documents == "isolate" else 1)
    params = weights_of(config)
    found, expected = similarity(model_of(config), params, batch), by_double_loop(config, params, batch)
    assert sorted(found) == sorted(NAMES)
    for name in NAMES:
        assert found[name].shape == (config.model.num_layers, config.attention.num_heads)
        np.testing.assert_allclose(found[name], expected[name], atol=3e-6, err_msg=name)


def test_full_xsa_leaves_nothing_along_the_own_value_and_sa_removes_nothing():
    config = tiny_config({"attention.kind": "xsa", "model.dtype": "bfloat16"})
    batch = random_batch(config)
    params = weights_of(config)
    xsa = similarity(model_of(config), params, batch)
    sa = similarity(model_of(tiny_config({"model.dtype": "bfloat16"})), params, batch)
    assert np.abs(xsa["cosine_xsa"]).max() < 1e-6
    assert np.abs(xsa["cosine"]).min() > 1e-3
    assert sa["removed"].max() < 1e-5
    np.testing.assert_allclose(sa["cosine_xsa"], sa["cosine"], atol=1e-6)
    np.testing.assert_allclose(xsa["cosine"][0], sa["cosine"][0], atol=1e-6)  # the first layer sees the same input


def test_tokens_that_see_only_themselves_do_not_count():
    config = tiny_config({"attention.window": 1})
    found = similarity(model_of(config), model_of(config).init(jax.random.key(0)), random_batch(config))
    assert all(np.isnan(x).all() for x in found.values())


def test_a_result_that_is_only_rounding_has_no_direction():
    """Keys that make every token attend to itself alone: z is the rounding of y - v."""
    v = np.random.default_rng(0).normal(size=(1, 32, 2, 8)).astype(np.float32)
    onehot = 100 * np.eye(32, dtype=np.float32)[None, :, None].repeat(2, axis=2)[..., :32]
    z = v + np.float32(1e-7) * v - v
    found = probe(onehot, onehot, np.concatenate([v] * 4, axis=-1), np.concatenate([z] * 4, axis=-1), **PLAIN)
    np.testing.assert_allclose(found["self_weight"], 1)
    np.testing.assert_array_equal(found["cosine_xsa"], 0)
    np.testing.assert_allclose(found["removed"], 1, atol=1e-6)


def test_long_rows_never_need_all_heads_at_once():
    """16 heads, 4 rows of 2048: all attention weights of a layer are 1 GiB."""
    shape = jax.ShapeDtypeStruct((4, 2048, 16, 8), jnp.float32)
    run = jax.jit(functools.partial(probe, **PLAIN))
    assert run.lower(shape, shape, shape, shape).compile().memory_analysis().temp_size_in_bytes < 150e6
