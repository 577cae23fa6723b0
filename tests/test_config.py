"""A wrong config stops at the edge with one line that names the field; a right one survives JSON unchanged."""

import dataclasses
import json
import typing
from typing import Any

import pytest

from configs import base
from tests.helpers import tiny_config, tiny_tree
from xsa_jax import config as config_module
from xsa_jax.config import Config, ConfigError, check_resumable, check_same_model, flatten, from_config_dict, to_dict, xsa_layers
from xsa_kernels.api import Impl

pytestmark = pytest.mark.fast


def _fields(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> declared type of every field."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= _fields(hint, f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


FIELDS = _fields()
NUMBERS = [name for name, hint in FIELDS.items() if hint in (int, float)]
# What must be set beside a field so that only the field itself is wrong.
BESIDE: dict[str, dict[str, Any]] = {"attention.xsa.alpha": {"attention.xsa.strength": "fixed"}}

# One other valid value for every field.
OTHER = {
    "seed": 1,
    "model.vocab_size": 64, "model.num_layers": 3, "model.d_model": 36, "model.d_ff": 50, "model.mlp": "swiglu",
    "model.norm": "rmsnorm", "model.embed_norm": False, "model.tie_embeddings": False, "model.logit_softcap": 30.0,
    "model.dropout": 0.1, "model.dtype": "bfloat16", "model.remat": "full",
    "attention.kind": "xsa", "attention.impl": "reference", "attention.num_heads": 6, "attention.num_kv_heads": 1,
    "attention.head_dim": 8, "attention.rope_theta": 5e5, "attention.qk_norm": True, "attention.window": 4,
    "attention.logit_softcap": 50.0, "attention.sinks": True, "attention.value_residual": True,
    "attention.xsa.layers": "first:1", "attention.xsa.strength": "fixed", "attention.xsa.alpha": 0.5,
    "attention.xsa.zero_rule": "add", "attention.xsa.eps": 1e-6,
    "data.path": "other", "data.seq_len": 17, "data.batch_size": 4, "data.documents": "isolate", "data.seed": 1,
    "data.workers": 1,
    "optim.name": "adamw", "optim.peak_lr": 1e-4, "optim.schedule": "constant", "optim.warmup_steps": 3,
    "optim.final_lr_ratio": 0.5, "optim.beta1": 0.8, "optim.beta2": 0.99, "optim.eps": 1e-6, "optim.weight_decay": 0.2,
    "optim.clip_norm": 2.0,
    "train.num_steps": 30, "train.z_loss": 1e-4, "train.loss_chunk": 4, "train.log_every": 2,
    "eval.every": 5, "eval.tokens": 128,
    "checkpoint.every": 7, "checkpoint.keep_last": 3, "checkpoint.keep_every": 4,
    "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2,
}  # fmt: skip


def refused(overrides: dict, field: str, *fragments: object) -> str:
    with pytest.raises(ConfigError) as error:
        tiny_config(overrides)
    text = str(error.value)
    assert text.startswith(field), text
    assert "\n" not in text
    for fragment in fragments:
        assert str(fragment) in text, text
    return text


def test_base_holds_every_field_and_is_valid():
    config = from_config_dict(base.get_config())
    assert dict(flatten(to_dict(config))).keys() == FIELDS.keys()


def test_json_round_trip_with_no_field_at_its_default():
    assert OTHER.keys() == FIELDS.keys()
    config = tiny_config(OTHER)
    assert from_config_dict(json.loads(json.dumps(to_dict(config)))) == config
    for name, value in flatten(to_dict(config)):
        assert value == OTHER[name], name


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().seed = 1  # type: ignore[misc]


def test_unknown_field_names_the_known_ones():
    refused({"attention.heads": 4}, "attention.heads: unknown field", "num_heads")
    refused({"modle": {}}, "modle: unknown field", "model")


def test_missing_field():
    tree = tiny_tree()
    del tree["attention"]["xsa"]["eps"]
    with pytest.raises(ConfigError, match=r"^attention\.xsa\.eps: missing"):
        from_config_dict(tree)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model.num_layers", True, "int"),
        ("model.num_layers", 2.0, "int"),
        ("model.num_layers", "2", "int"),
        ("model.num_layers", None, "int"),
        ("optim.peak_lr", "1e-3", "float"),
        ("optim.peak_lr", True, "float"),
        ("attention.qk_norm", 1, "bool"),
        ("attention.xsa.layers", 3, "str"),
        ("model", 3, "group"),
        ("model.d_ff", {"a": 1}, "int"),
        ("attention.kind", "XSA", "'sa', 'xsa'"),
        ("attention.kind", True, "'sa', 'xsa'"),
    ],
)
def test_wrong_type(field, value, expected):
    tree = tiny_tree()
    *groups, last = field.split(".")
    node = tree
    for group in groups:
        node = node[group]
    node[last] = value
    with pytest.raises(ConfigError, match=rf"^{field}") as error:
        from_config_dict(tree)
    assert expected in str(error.value)
    assert repr(value) in str(error.value)


def test_an_int_may_stand_for_a_float():
    lr = tiny_config({"optim.peak_lr": 1}).optim.peak_lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize("field", NUMBERS)
def test_every_number_has_a_least_value(field):
    hint = FIELDS[field]
    for bad in [-(10**9)] if hint is int else [float("nan"), float("inf"), float("-inf")]:
        refused({field: bad, **BESIDE.get(field, {})}, field, bad)


def test_the_table_of_least_values_names_real_fields_and_is_strict():
    assert config_module._AT_LEAST.keys() <= set(NUMBERS)
    for field, least in config_module._AT_LEAST.items():
        below = least - 1 if FIELDS[field] is int else least - 0.001
        refused({field: below}, field, below, least)


@pytest.mark.parametrize(
    ("overrides", "field", "fragments"),
    [
        ({"attention.num_kv_heads": 3}, "attention.num_heads=4", ["num_kv_heads=3"]),
        ({"attention.num_kv_heads": 8}, "attention.num_heads=4", ["num_kv_heads=8"]),
        ({"attention.head_dim": 7}, "attention.head_dim=7", ["even"]),
        ({"attention.xsa.alpha": 0.5}, "attention.xsa.alpha=0.5", ["strength='full'", "'fixed'"]),
        ({"attention.xsa.alpha": 0.5, "attention.xsa.strength": "learned"}, "attention.xsa.alpha=0.5", ["strength='learned'"]),
        ({"attention.xsa.eps": 0.0}, "attention.xsa.eps=0", ["zero_rule='clamp'"]),
        ({"attention.xsa.eps": 0.0, "attention.xsa.zero_rule": "add"}, "attention.xsa.eps=0", ["zero_rule='add'"]),
        ({"attention.xsa.layers": "first:3"}, "attention.xsa.layers='first:3'", ["2 layers"]),
        ({"model.dropout": 1.0}, "model.dropout=1.0", ["less than 1"]),
        ({"optim.peak_lr": 0.0}, "optim.peak_lr=0.0", ["more than 0"]),
        ({"optim.beta1": 1.0}, "optim.beta1=1.0", ["less than 1"]),
        ({"optim.beta2": 1.0}, "optim.beta2=1.0", ["less than 1"]),
        ({"optim.final_lr_ratio": 1.5}, "optim.final_lr_ratio=1.5", ["at most 1"]),
        ({"optim.warmup_steps": 20}, "optim.warmup_steps=20", ["train.num_steps=20"]),
        ({"mesh.data": 0}, "mesh.data=0", ["-1"]),
        ({"mesh.data": 3}, "data.batch_size=8", ["3"]),
        ({"mesh.data": 2, "mesh.fsdp": 8}, "data.batch_size=8", ["16"]),
        ({"mesh.tensor": 8}, "attention.num_heads=4", ["mesh.tensor=8"]),
        ({"mesh.tensor": 4, "model.d_ff": 50}, "model.d_ff=50", ["mesh.tensor=4"]),
        ({"mesh.tensor": 4}, "model.vocab_size=62", ["mesh.tensor=4"]),
        ({"mesh.fsdp": 8, "model.d_model": 36}, "model.d_model=36", ["mesh.fsdp=8"]),
    ],
)
def test_impossible_beside_the_others(overrides, field, fragments):
    refused(overrides, field, *fragments)


def test_what_the_rules_leave_free():
    tiny_config({"attention.xsa.eps": 0.0, "attention.xsa.zero_rule": "exact"})
    tiny_config({"attention.xsa.alpha": 0.0, "attention.xsa.strength": "fixed"})
    tiny_config({"attention.num_kv_heads": 1, "mesh.tensor": 2})  # fewer KV heads than tensor shards: kept whole
    tiny_config({"optim.warmup_steps": 0, "optim.final_lr_ratio": 1, "optim.clip_norm": 0})


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("all", {0, 1, 2, 3, 4, 5}),
        ("first:2", {0, 1}),
        ("first:6", {0, 1, 2, 3, 4, 5}),
        ("last:1", {5}),
        ("last:4", {2, 3, 4, 5}),
        ("every:1", {0, 1, 2, 3, 4, 5}),
        ("every:2", {1, 3, 5}),
        ("every:4", {3}),
        ("0", {0}),
        ("5,0,3", {0, 3, 5}),
    ],
)
def test_xsa_layers(spec, chosen):
    assert xsa_layers(spec, 6) == tuple(layer in chosen for layer in range(6))


@pytest.mark.parametrize(
    "spec", ["", "none", "first", "first:", "first:0", "first:7", "last:-1", "every:1.5", "every:0", "6", "-1", "0,,1"]
)
def test_xsa_layers_refuses(spec):
    with pytest.raises(ConfigError, match=r"^attention\.xsa\.layers=") as error:
        xsa_layers(spec, 6)
    assert repr(spec) in str(error.value)
    assert "from 0 to 5" in str(error.value)


MAY_CHANGE_ON_RESUME = {
    "attention.impl", "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every", "data.path", "data.workers",
    "eval.every", "eval.tokens", "mesh.data", "mesh.fsdp", "mesh.tensor", "model.remat", "train.log_every", "train.loss_chunk",
}  # fmt: skip
MAY_CHANGE_AROUND_WEIGHTS = {"attention.impl", "model.dropout", "model.dtype", "model.remat"}


def _changed(field: str) -> Config:
    return tiny_config({field: OTHER[field], **BESIDE.get(field, {})})


@pytest.mark.parametrize("field", [name for name in FIELDS if name != "optim.name"])  # it has one value only
def test_what_may_change_between_a_run_and_its_continuation(field):
    stored, now = json.loads(json.dumps(to_dict(tiny_config()))), _changed(field)
    old, new = dict(flatten(stored))[field], OTHER[field]
    assert old != new
    both = f"{field} (run: {old!r}, now: {new!r})"
    same_model = not field.startswith(("attention.", "model.")) or field in MAY_CHANGE_AROUND_WEIGHTS
    for check, allowed in [(check_resumable, field in MAY_CHANGE_ON_RESUME), (check_same_model, same_model)]:
        if allowed:
            check(stored, now, "runs/x")
        else:
            with pytest.raises(ConfigError, match="runs/x") as error:
                check(stored, now, "runs/x")
            assert both in str(error.value)


def test_a_field_that_the_stored_run_never_had_is_named():
    stored = to_dict(tiny_config())
    del stored["attention"]["sinks"]
    with pytest.raises(ConfigError, match=r"attention\.sinks \(run: '<absent>', now: False\)"):
        check_resumable(stored, tiny_config(), "runs/x")


def test_every_attention_implementation_can_be_chosen():
    choices = typing.get_args(_fields()["attention.impl"])
    assert choices == typing.get_args(Impl)
