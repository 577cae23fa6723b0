"""A wrong config stops at the edge with one line that names the field; a right one survives JSON unchanged."""

import dataclasses
import json

import pytest

from tests.config.helpers import BESIDE, FIELDS, NUMBERS, OTHER
from tests.helpers import tiny_config, tiny_tree
from xsa_jax.config import config_dict, flatten, from_config_dict, to_dict
from xsa_jax.config.fields import fields
from xsa_jax.config.layer_selection import select
from xsa_jax.errors import ConfigError

pytestmark = pytest.mark.fast


def refused(overrides: dict, field: str, *fragments: object) -> str:
    with pytest.raises(ConfigError) as error:
        tiny_config(overrides)
    text = str(error.value)
    assert text.startswith(field), text
    assert "\n" not in text
    for fragment in fragments:
        assert str(fragment) in text, text
    return text


def test_the_defaults_hold_every_field_and_are_valid():
    config = from_config_dict(config_dict())
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


def test_least_values_are_strict():
    bounded = {name: declared.about.least for name, declared in fields().items() if declared.about.least is not None}
    assert bounded.keys() == set(NUMBERS) - {"attention.xsa.alpha"}
    for name, least in bounded.items():
        below = least - 1 if FIELDS[name] is int else least - 0.001
        refused({name: below}, name, below, least)


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
        ({"mesh.tensor": 4, "model.vocab_size": 62}, "model.vocab_size=62", ["mesh.tensor=4"]),
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


@pytest.mark.parametrize("kind", ["sa", "xsa"])
def test_layers_that_a_model_does_not_have_are_refused(kind):
    refused({"attention.kind": kind, "attention.xsa.layers": "first:3"}, "attention.xsa.layers='first:3'", "2 layers")


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
def test_chosen_layers(spec, chosen):
    assert select(spec, 6) == tuple(layer in chosen for layer in range(6))


@pytest.mark.parametrize(
    "spec", ["", "none", "first", "first:", "first:0", "first:7", "last:-1", "every:1.5", "every:0", "6", "-1", "0,,1"]
)
def test_layers_that_do_not_exist_are_refused(spec):
    with pytest.raises(ConfigError, match=r"^attention\.xsa\.layers=") as error:
        select(spec, 6)
    assert repr(spec) in str(error.value)
    assert "from 0 to 5" in str(error.value)
