"""What may differ between runs, how configs of other versions are read, and what a new field takes."""

import dataclasses
import json
import subprocess
import sys
import typing
from typing import Any, Literal

import pytest

from tests.config.helpers import BESIDE, FIELDS, OTHER
from tests.helpers import REPO, subprocess_env, tiny_config
from xsa_jax.config import Config, TrainConfig, config_dict, flatten, from_config_dict, table, to_dict
from xsa_jax.config.fields import fields
from xsa_jax.config.rules import check_continues, check_same_weights, differences, fixed_in_comparisons
from xsa_jax.config.schema import field
from xsa_jax.config.stored import from_stored, to_stored
from xsa_jax.errors import ConfigError
from xsa_kernels.api import Impl

pytestmark = pytest.mark.fast


MAY_CHANGE_ON_RESUME = {
    "attention.impl", "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every", "data.path", "data.workers",
    "eval.every", "eval.tokens", "mesh.data", "mesh.fsdp", "mesh.tensor", "model.remat", "model.scan_unroll",
    "train.deterministic", "train.log_every", "train.loss_chunk_tokens", *(name for name in FIELDS if name.startswith("watchdog.")),
}  # fmt: skip
MAY_CHANGE_AROUND_WEIGHTS = {"attention.impl", "model.dropout", "model.dtype", "model.remat", "model.scan_unroll"}


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
    "model.scan_unroll", "train.deterministic", "train.log_every",
    *(name for name in FIELDS if name.startswith(("attention.", "watchdog."))),
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
