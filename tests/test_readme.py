"""What the README says is true, and so is what the shipped configs say of themselves."""

import importlib.util
import re
import types

import pytest

from tests.helpers import REPO
from xsa_jax.config import config_dict, flatten, from_config_dict
from xsa_jax.errors import ConfigError
from xsa_jax.train.flops import train_flops_per_token

pytestmark = pytest.mark.fast
PAGES = ("README.md", "CONTRIBUTING.md", "docs/config.md", "kernels/README.md")


def config_file(name: str) -> types.ModuleType:
    """A module of configs/, which is a folder of files and no package."""
    spec = importlib.util.spec_from_file_location(name, REPO / "configs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_is_shown_as_its_command_made_it():
    table = (REPO / "benchmarks" / "results" / "demo" / "table.md").read_text().split("\n\n")[0]
    text = (REPO / "README.md").read_text()
    assert table in text
    assert "DEMO_" not in text.replace("DEMO_FLAGS", ""), "a placeholder is left"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    file = REPO / page
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", file.read_text()) if not link.startswith("http")]
    assert [link for link in links if not (file.parent / link).exists()] == []
    if page == "README.md":
        assert len(links) >= 4


def test_files_that_are_named_exist():
    """In the README and in CONTRIBUTING; a name stands for a path from the root or inside one of the two packages."""
    for page in ("README.md", "CONTRIBUTING.md"):
        names = re.findall(r"`([\w./]+\.(?:py|md|json|sh))`", (REPO / page).read_text())
        made_by_runs = {"config.json"}
        roots = (REPO, REPO / "xsa_jax", REPO / "xsa_jax" / "train", REPO / "kernels" / "xsa_kernels")
        missing = [name for name in names if name not in made_by_runs and not any((root / name).exists() for root in roots)]
        assert missing == [], page


def test_the_readme_fits_four_screens():
    assert len((REPO / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", ["smoke", "demo"])
def test_a_config_file_is_valid_and_says_what_it_asks(name):
    module = config_file(name)
    from_config_dict(module.get_config())
    assert "?" in module.__doc__
    assert "Command:" in module.__doc__
    assert "Result:" in module.__doc__


@pytest.mark.parametrize(("size", "parameters"), [("0p7b", 0.757e9), ("1p3b", 1.311e9), ("2p7b", 2.646e9)])
def test_a_pair_of_the_paper_differs_in_the_kind_of_attention_alone(size, parameters):
    paper = config_file("paper")
    sa, xsa = paper.get_config(size), paper.get_config(size)
    sa.attention.kind, xsa.attention.kind = "sa", "xsa"
    first, second = (dict(flatten(config.to_dict())) for config in (sa, xsa))
    assert {name for name in first if first[name] != second[name]} == {"attention.kind"}
    assert paper.overrides(size).keys() <= dict(flatten(config_dict().to_dict())).keys()
    # 6 FLOPs a weight and token, and attention on top: the size is the one in its name.
    config = from_config_dict(xsa)
    attention = (
        12 * config.model.num_layers * config.attention.num_heads * config.attention.head_dim * (config.data.seq_len + 1) / 2
    )
    flops = train_flops_per_token(config).model
    assert (flops - attention) / 6 == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("size", ["", "7b", "0P7B"])
def test_a_size_that_the_paper_does_not_have_is_refused(size):
    with pytest.raises(ConfigError, match=rf"configs/paper.py: found size '{size}', expected .*SIZE with one of 0p7b, 1p3b, 2p7b"):
        config_file("paper").get_config(size)
