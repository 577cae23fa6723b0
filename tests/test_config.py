"""A wrong config stops at the edge with one line that names the field; a right one survives JSON unchanged."""

import dataclasses
import json
import subprocess
import sys
import typing
from typing import Any, Literal

import pytest

from tests.helpers import REPO, subprocess_env, tiny_config, tiny_tree
from xsa_jax.config import Config, TrainConfig, config_dict, flatten, from_config_dict, table, to_dict
from xsa_jax.config.fields import fields
from xsa_jax.config.layer_selection import select
from xsa_jax.config.rules import check_continues, check_same_weights, differences, fixed_in_comparisons
from xsa_jax.config.schema import field
from xsa_jax.config.stored import from_stored, to_stored
from xsa_jax.errors import ConfigError
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


MAY_CHANGE_ON_RESUME = {
    "attention.impl", "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every", "data.path", "data.workers",
    "eval.every", "eval.tokens", "mesh.data", "mesh.fsdp", "mesh.tensor", "model.remat", "train.log_every", "train.loss_chunk",
}  # fmt: skip
MAY_CHANGE_AROUND_WEIGHTS = {"attention.impl", "model.dropout", "model.dtype", "model.remat"}


def _changed(name: str) -> Config:
    return tiny_config({name: OTHER[name], **BESIDE.get(name, {})})


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "optim.name"])  # it has one value only
def test_what_may_change_between_a_run_and_its_continuation(name):
    stored, now = from_stored(json.loads(json.dumps(to_stored(tiny_config()))), "runs/x"), _changed(name)
    old, new = dict(flatten(to_dict(stored)))[name], OTHER[name]
    assert old != new
    both = f"{name} (run: {old!r}, now: {new!r})"
    same_model = not name.startswith(("attention.", "model.")) or name in MAY_CHANGE_AROUND_WEIGHTS
    for rule, other, allowed in [
        (check_continues, (now,), name in MAY_CHANGE_ON_RESUME),
        (check_same_weights, (now.model, now.attention), same_model),
    ]:
        if allowed:
            rule(stored, *other, "runs/x")
        else:
            with pytest.raises(ConfigError, match="runs/x") as error:
                rule(stored, *other, "runs/x")
            assert both in str(error.value)


MAY_DIFFER_IN_COMPARISONS = {
    "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every", "data.path", "data.workers", "eval.every", "eval.tokens",
    "train.log_every", *(name for name in FIELDS if name.startswith("attention.")),
}  # fmt: skip


def test_what_may_differ_between_compared_runs():
    assert set(fixed_in_comparisons()) == FIELDS.keys() - MAY_DIFFER_IN_COMPARISONS
    assert set(fixed_in_comparisons(["optim", "seed"])) == {
        name for name in FIELDS.keys() - MAY_DIFFER_IN_COMPARISONS if not name.startswith("optim.") and name != "seed"
    }
    assert set(fixed_in_comparisons(["see", "optim.peak"])) == set(fixed_in_comparisons())


def test_a_field_that_every_run_has_stored_is_named_where_it_is_missing():
    stored = to_stored(tiny_config())
    del stored["attention"]["sinks"]
    with pytest.raises(ConfigError, match=r"^runs/x: attention\.sinks is missing, .*restore the file"):
        from_stored(stored, "runs/x")


@pytest.mark.parametrize("version", ["9.9.9", None])
def test_a_field_of_a_newer_version_is_refused_with_both_versions(version):
    stored = to_stored(tiny_config()) | {"version": version}
    stored["optim"]["muon"] = True
    if version is None:
        del stored["version"]
    with pytest.raises(ConfigError) as error:
        from_stored(stored, "runs/x")
    here = to_stored(tiny_config())["version"]
    wrote = version or "before 0.2.0"
    assert str(error.value).startswith(
        f"runs/x: unknown field optim.muon: version {wrote} of xsa_jax wrote it, and this is {here}."
    )
    assert str(error.value).endswith("Use that version or a newer one")


def test_a_stored_field_that_its_own_version_does_not_know_was_edited():
    stored = to_stored(tiny_config())
    stored["optim"]["muon"] = True
    with pytest.raises(ConfigError, match=r"unknown field optim\.muon: .*The file was edited: remove the field$"):
        from_stored(stored, "runs/x")
    with pytest.raises(ConfigError, match=r"^runs/x: optim: expected a group of fields, found 3"):
        from_stored(to_stored(tiny_config()) | {"optim": 3}, "runs/x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"newgroup": {}}, "unknown field newgroup"),
        ({"seed": {"a": 1}}, "seed={'a': 1}: expected int"),
        ({"model": None}, "model: expected a group of fields, found None"),
        ({"model.d_ff": 99}, "model.d_ff: expected no '.'"),
        ({"version": "9.9.9", "seed": -1}, "seed=-1: .*version 9.9.9 of xsa_jax wrote it, this is "),
    ],
)
def test_a_stored_config_of_another_form_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=rf"^runs/x: {message}"):
        from_stored(to_stored(tiny_config()) | change, "runs/x")


@pytest.mark.parametrize("stored", [None, 3, [], "config"])
def test_what_is_no_stored_config_is_refused(stored):
    with pytest.raises(ConfigError, match=r"^runs/x: expected a stored config, found "):
        from_stored(stored, "runs/x")


def test_an_impossible_stored_value_names_the_run_and_the_field():
    stored = to_stored(tiny_config())
    stored["optim"]["beta1"] = 2.0
    with pytest.raises(ConfigError, match=r"^runs/x: optim\.beta1=2\.0: expected less than 1"):
        from_stored(stored, "runs/x")


# A copy of the schema with one field more. Nothing else knows of it.
_Trained = dataclasses.make_dataclass(
    "_Trained",
    [
        (
            "skip_outliers",
            Literal["never", "loss", "gradient"],
            field("loss", "steps that are skipped", may_change=True, may_differ=True, before="never"),
        ),
        ("patience", int, field(3, "outliers in a row that end the run", least=1, before=1)),
    ],
    bases=(TrainConfig,),
    frozen=True,
)
_Longer = dataclasses.make_dataclass(
    "_Longer", [("train", _Trained, dataclasses.field(default_factory=_Trained))], bases=(Config,), frozen=True
)


def test_a_new_field_is_a_line_of_the_schema():
    tree = config_dict(_Longer)
    assert (tree.train.skip_outliers, tree.train.patience) == ("loss", 3)
    assert "| `train.skip_outliers` | `loss` | steps that are skipped | yes | yes |" in table.markdown(_Longer)
    assert "| `train.patience` | `3` | outliers in a row that end the run |  |  |" in table.markdown(_Longer)

    now: Any = from_config_dict(tree, _Longer)
    assert now.train.patience == 3
    for bad, message in ((0, "expected a finite number of at least 1"), ("3", "expected int")):
        tree.train.unlock()
        broken = tree.to_dict()
        broken["train"]["patience"] = bad
        with pytest.raises(ConfigError, match=rf"^train\.patience={bad!r}: {message}"):
            from_config_dict(broken, _Longer)
    tree.train.skip_outliers = "all"
    with pytest.raises(ConfigError, match=r"^train\.skip_outliers='all': expected one of 'never', 'loss', 'gradient'"):
        from_config_dict(tree, _Longer)

    # A run from before takes the value that describes what it did.
    old: Any = from_stored(to_stored(Config()), "runs/x", _Longer)
    assert (old.train.skip_outliers, old.train.patience) == ("never", 1)
    with pytest.raises(ConfigError, match=r"another config: train\.patience \(run: 1, now: 3\)\. Use"):
        check_continues(old, now, "runs/x")
    assert "train.skip_outliers" not in fixed_in_comparisons((), _Longer)
    assert "train.patience" in fixed_in_comparisons((), _Longer)
    assert differences(to_dict(old), to_dict(now), fixed_in_comparisons((), _Longer)) == {"train.patience": (1, 3)}
    with pytest.raises(ConfigError, match=r"unknown field train\.skip_outliers, train\.patience"):
        from_stored(to_stored(now), "runs/x")


def test_every_field_says_what_it_is():
    for name, declared in fields().items():
        assert declared.about.doc, name
        assert "\n" not in declared.about.doc, name
        assert declared.type in (int, float, bool, str), name
        if declared.type in (int, float):
            assert declared.about.least is not None or name == "attention.xsa.alpha"


def test_the_table_in_docs_is_current():
    assert (REPO / "docs" / "config.md").read_text() == table.markdown(), "run make docs"


def test_every_attention_implementation_can_be_chosen():
    assert fields()["attention.impl"].choices == typing.get_args(Impl)


def test_print_config_shows_every_field_and_trains_nothing(tmp_path):
    command = [sys.executable, str(REPO / "train.py"), f"--config={REPO}/configs/smoke.py", "--print_config", "--config.seed=3"]
    done = subprocess.run(command, env=subprocess_env(), cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split("=")[0] for line in lines] == list(FIELDS)
    assert "seed=3  # default: 0" in lines
    assert "optim.beta2=0.95" in lines
    assert list(tmp_path.iterdir()) == []
