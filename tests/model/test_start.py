"""The first step of every shipped config at full width: a loss of ln V, and gradients of one size."""

import importlib.util
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import REPO, model_of
from xsa_jax.config import Config, from_config_dict
from xsa_jax.train.loss import loss_sums

SHIPPED = [("smoke", ()), ("demo", ()), ("paper", ("0p7b",)), ("paper", ("1p3b",)), ("paper", ("2p7b",))]
LARGE = {("1p3b",), ("2p7b",)}


def _config(name: str, arguments: tuple[str, ...], *, tied: bool) -> Config:
    """The shipped config with at most three layers, for two rows of 32 tokens."""
    spec = importlib.util.spec_from_file_location(name, REPO / "configs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*arguments)
    config.model.update(num_layers=min(3, config.model.num_layers), dtype="float32", remat="none", tie_embeddings=tied)
    config.attention.kind = "xsa"
    config.data.update(seq_len=32, batch_size=2)
    return from_config_dict(config)


def _norm(tree) -> float:
    return math.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(tree)))


def test_every_shipped_config_is_covered():
    assert {name for name, _ in SHIPPED} == {path.stem for path in (REPO / "configs").glob("*.py")}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [pytest.param(*case, marks=[pytest.mark.long] if case[1] in LARGE else []) for case in SHIPPED],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def test_loss_starts_at_ln_v_and_gradients_at_one_size(name, arguments, tied):
    if not tied and arguments and arguments != ("0p7b",):
        pytest.skip("one wide untied config is enough; no shipped one is untied")
    config = _config(name, arguments, tied=tied)
    model = model_of(config)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (2, 33), dtype=np.int32)

    def loss(params):
        sums = loss_sums(model.bind(params), {"tokens": tokens}, chunk_tokens=64)
        return sums.nll / sums.tokens

    first, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert float(first) == pytest.approx(math.log(config.model.vocab_size), abs=0.15)
    layers = [_norm(jax.tree.map(lambda leaf, i=i: leaf[i], gradients["blocks"])) for i in range(config.model.num_layers)]
    assert max(layers) < 10 * min(layers), layers
    if config.model.d_model > 1000 and tied:
        assert max(layers) < 10 * _norm(gradients["embed"]) < 100 * min(layers), (layers, _norm(gradients["embed"]))
