"""What the README says about the configs is true."""

import importlib
import re

import pytest
from configs.base import get_config

from tests.helpers import REPO
from xsa_jax.config import flatten, from_config_dict
from xsa_jax.train.metrics import train_flops_per_token

pytestmark = pytest.mark.fast


def test_the_table_names_every_field_with_its_default():
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \| (.+) \|$", (REPO / "README.md").read_text(), re.MULTILINE)
    assert {name: default for name, default, _ in rows} == {name: str(value) for name, value in flatten(get_config().to_dict())}


def test_the_demo_is_shown_as_its_command_made_it():
    text = (REPO / "README.md").read_text()
    table = (REPO / "benchmarks" / "results" / "demo" / "table.md").read_text().split("\n\n")[0]
    assert table in text
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(links) >= 4
    assert [link for link in links if not (REPO / link).exists()] == []


@pytest.mark.parametrize(("size", "parameters"), [("0p7b", 0.757e9), ("1p3b", 1.311e9), ("2p7b", 2.646e9)])
def test_the_configs_of_a_pair_differ_in_the_kind_of_attention_alone(size, parameters):
    pair = {kind: importlib.import_module(f"configs.{kind}_{size}") for kind in ("sa", "xsa")}
    sa, xsa = (dict(flatten(pair[kind].get_config().to_dict())) for kind in ("sa", "xsa"))
    assert {name for name in sa if sa[name] != xsa[name]} == {"attention.kind"}
    code = {kind: re.sub(r'^""".*?"""', "", (REPO / "configs" / f"{kind}_{size}.py").read_text(), flags=re.DOTALL) for kind in pair}
    different = [lines for lines in zip(code["sa"].splitlines(), code["xsa"].splitlines(), strict=True) if lines[0] != lines[1]]
    assert different == [('    config.attention.kind = "sa"', '    config.attention.kind = "xsa"')]
    # 6 FLOPs a weight and token, and attention on top: the size is the one in its name.
    config = from_config_dict(pair["xsa"].get_config())
    attention = 12 * config.model.num_layers * config.attention.num_heads * config.attention.head_dim * config.data.seq_len
    assert (train_flops_per_token(config) - attention) / 6 == pytest.approx(parameters, rel=0.01)
