"""The chunked cross-entropy against a plain float64 one, and what it allocates."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assembled, assert_trees_close, mesh_of, model_of, random_batch, random_params, tiny_config
from tests.model.oracle import log_softmax
from xsa_jax.parallel.mesh import put_batch
from xsa_jax.train.loss import loss_sums, shift, token_nll

HEAD = tiny_config({"model.logit_softcap": 1.5, "model.tie_embeddings": False, "model.num_layers": 1})


def _head_case(T: int = 13):
    """A head with a soft-cap, a hidden state and targets; T is no multiple of any chunk but 1 and itself."""
    model = model_of(HEAD)
    params = random_params(model)
    rng = np.random.default_rng(3)
    hidden_BTD = rng.normal(size=(3, T, HEAD.model.d_model)).astype(np.float32)
    targets_BT = rng.integers(0, HEAD.model.vocab_size, (3, T), dtype=np.int32)
    return model, params, hidden_BTD, targets_BT


@pytest.mark.fast
def test_token_nll_equals_a_plain_log_softmax_whatever_the_chunk():
    model, params, hidden_BTD, targets_BT = _head_case()
    raw_BTV = hidden_BTD.astype(np.float64) @ np.asarray(params["unembed"], np.float64)
    logits_BTV = 1.5 * np.tanh(raw_BTV / 1.5)
    log_p_BTV = log_softmax(logits_BTV)
    expected_nll = -np.take_along_axis(log_p_BTV, targets_BT[..., None], -1)[..., 0]
    expected_logz = np.log(np.exp(logits_BTV).sum(-1))
    for chunk in (1, 12, 39, 192):  # three rows: 1, 4, 13 and 64 positions
        nll_BT, logz_BT = token_nll(model.bind(params), jnp.array(hidden_BTD), jnp.array(targets_BT), chunk)
        assert nll_BT.dtype == logz_BT.dtype == jnp.float32
        np.testing.assert_allclose(nll_BT, expected_nll, atol=2e-6, rtol=0)
        np.testing.assert_allclose(logz_BT, expected_logz, atol=2e-6, rtol=0)


@pytest.mark.fast
def test_gradients_do_not_depend_on_the_chunk():
    model, params, hidden_BTD, targets_BT = _head_case()
    weights_BT = np.random.default_rng(4).uniform(size=targets_BT.shape).astype(np.float32)

    def plain(params, hidden_BTD):
        logits_BTV = 1.5 * jnp.tanh(hidden_BTD @ params["unembed"] / 1.5)
        log_p_BTV = jax.nn.log_softmax(logits_BTV)
        return -jnp.sum(weights_BT * jnp.take_along_axis(log_p_BTV, targets_BT[..., None], -1)[..., 0])

    def chunked(params, hidden_BTD, chunk):
        return jnp.sum(weights_BT * token_nll(model.bind(params), hidden_BTD, jnp.array(targets_BT), chunk)[0])

    expected = jax.grad(plain, (0, 1))(params, hidden_BTD)
    for chunk in (12, 192):
        assert_trees_close(jax.grad(chunked, (0, 1))(params, hidden_BTD, chunk), expected, 1e-5)


@pytest.mark.fast
def test_split_shifts_and_counts_no_target_of_another_document():
    tokens = jnp.array([[10, 11, 12, 13, 14]])
    plain = shift({"tokens": tokens})
    assert plain.inputs_BT.tolist() == [[10, 11, 12, 13]]
    assert plain.targets_BT.tolist() == [[11, 12, 13, 14]]
    assert plain.segment_ids_BT is None
    assert plain.weights_BT.tolist() == [[1, 1, 1, 1]]
    packed = shift({"tokens": tokens, "segment_ids": jnp.array([[1, 1, 2, 2, 3]])})
    assert packed.segment_ids_BT is not None
    assert packed.segment_ids_BT.tolist() == [[1, 1, 2, 2]]
    assert packed.weights_BT.tolist() == [[1, 0, 1, 0]]
    assert packed.weights_BT.dtype == jnp.float32


@pytest.mark.fast
def test_sums_are_weighted_by_token_and_add_up_over_batches():
    """Two halves with unequal counts give, added, what the whole gives: loss, z, count and gradient."""
    config = tiny_config({"attention.kind": "xsa", "model.num_layers": 1})
    model = model_of(config)
    params = random_params(model)
    batch: dict[str, Any] = random_batch(config, documents=4)
    batch["segment_ids"][4:] = 1  # one document in each row of the second half: more targets count
    sums = jax.jit(lambda params, batch: loss_sums(model.bind(params), batch, 8))
    whole, first, second = (sums(params, {name: x[rows] for name, x in batch.items()}) for rows in np.s_[:, :4, 4:])
    assert (float(first.tokens), float(second.tokens), float(whole.tokens)) == (4 * 13, 4 * 16, 4 * 29)
    assert_trees_close(jax.tree.map(jnp.add, first, second), whole, 1e-6)

    inputs_BT, targets_BT, segments_BT, weights_BT = shift(batch)
    transformer = model.bind(params)
    logits_BTV = np.asarray(transformer.logits(transformer(inputs_BT, segments_BT)[0]), np.float64)
    nll_BT = -np.take_along_axis(log_softmax(logits_BTV), np.asarray(targets_BT)[..., None], -1)[..., 0]
    logz_BT = np.log(np.exp(logits_BTV).sum(-1))
    counted_BT = np.asarray(weights_BT) > 0
    assert_trees_close(tuple(whole), (nll_BT[counted_BT].sum(), (logz_BT[counted_BT] ** 2).sum(), counted_BT.sum()), 1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_full_logits_never_exist(tied, dtype):
    """GPT-2's vocabulary and 2048 tokens, forward and backward, compiled for shapes alone."""
    config = tiny_config({
        "model.vocab_size": 50304, "model.num_layers": 1, "model.tie_embeddings": tied, "model.dtype": dtype,
        "data.seq_len": 2048, "data.batch_size": 1,
    })  # fmt: skip
    model = model_of(config)
    hidden_BTD = jax.ShapeDtypeStruct((1, 2048, config.model.d_model), dtype)
    targets_BT = jax.ShapeDtypeStruct((1, 2048), jnp.int32)

    def head(params, hidden_BTD, targets_BT, chunk):
        nll_BT, logz_BT = token_nll(model.bind(params), hidden_BTD, targets_BT, chunk)
        return nll_BT.sum() + 1e-4 * jnp.square(logz_BT).sum()

    def temporary(chunk: int) -> int:
        program = jax.jit(jax.value_and_grad(head, (0, 1)), static_argnums=3)
        analysis: Any = program.lower(model.abstract_params, hidden_BTD, targets_BT, chunk).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    full_logits = 2048 * 50304 * 4
    assert temporary(128) < full_logits / 3
    assert temporary(2048) > full_logits  # the measure sees them where they do exist


def _collectives(hlo: str) -> dict[str, list[str]]:
    """The all-gathers and all-reduces of each computation of a program, as lines."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in hlo.splitlines():
        if (header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)) is not None:
            name = "ENTRY" if header[1] else header[2]
        elif re.search(r" (all-gather|all-reduce|reduce-scatter)(-start)?\(", line):
            found.setdefault(name, []).append(line.strip())
    return found


@pytest.mark.parametrize("mesh", [{"mesh.fsdp": 8}, {"mesh.fsdp": 2, "mesh.tensor": 2}])
def test_the_output_matrix_is_gathered_once_and_its_gradient_reduced_once(mesh):
    """Not once per chunk: nothing of the vocabulary's size is moved within a loop, of the loss or of the layers."""
    config = tiny_config({"train.loss_chunk_tokens": 2, "model.scan_unroll": 1, "model.vocab_size": 1016, **mesh})
    moved = _collectives(assembled(config, 8).lower().compile().as_text())
    sizes = {
        line: [int(size) for size in re.findall(r"\d+", line.split("=")[1].split("]")[0])]
        for lines in moved.values()
        for line in lines
    }
    of_the_table = {name: [line for line in lines if {1016, 508} & set(sizes[line])] for name, lines in moved.items()}
    assert of_the_table.pop("ENTRY"), moved
    assert not any(of_the_table.values()), of_the_table


# The rows of 62 tokens are whole on each fsdp shard; those of 64 are split among them.
@pytest.mark.parametrize(("tie", "vocab"), [(True, 64), pytest.param(True, 62, marks=pytest.mark.long), (False, 62)])
def test_a_mesh_changes_neither_losses_nor_gradients(tie, vocab):
    config = tiny_config(
        {
            "model.tie_embeddings": tie,
            "model.vocab_size": vocab,
            "model.logit_softcap": 5.0,
            "train.loss_chunk_tokens": 2,
            "data.documents": "isolate",
        }
    )
    model = model_of(config)
    params, batch = random_params(model), random_batch(config, documents=3)

    def loss(params, batch):
        sums = loss_sums(model.bind(params), batch, config.train.loss_chunk_tokens)
        return sums.nll + 1e-3 * sums.z

    expected = jax.jit(jax.value_and_grad(loss))(params, batch)
    for sizes in ({"mesh.fsdp": 8}, {"mesh.fsdp": 2, "mesh.tensor": 2}, {"mesh.tensor": 2}):
        mesh = mesh_of(tiny_config(sizes), 8)
        with jax.set_mesh(mesh):
            found = jax.jit(jax.value_and_grad(loss))(params, put_batch(mesh, batch))
        assert_trees_close(found, expected, 2e-5)
