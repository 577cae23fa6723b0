"""Imports run one way, so that each part can be read, tested and reused without those above it."""

import ast
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import REPO, subprocess_env

pytestmark = pytest.mark.fast

# Part -> the parts of this repository that it may import, itself left out. A module belongs to the longest name that fits.
_PLAIN = {"xsa_jax.errors", "xsa_jax.files", "xsa_jax.labels", "xsa_jax.progress"}
ALLOWED = {
    "xsa_kernels": set(),
    "configs": {"xsa_jax.config", "xsa_jax.errors"},
    "xsa_jax": set(),
    "xsa_jax.errors": set(),
    "xsa_jax.files": set(),
    "xsa_jax.labels": set(),
    "xsa_jax.progress": set(),
    "xsa_jax.config": {"xsa_kernels.registry", "xsa_jax.__version__", "xsa_jax.errors"},
    "xsa_jax.parallel": {"xsa_kernels", "xsa_jax.errors", "xsa_jax.config"},
    "xsa_jax.model": {"xsa_kernels", "xsa_jax.errors", "xsa_jax.config", "xsa_jax.parallel"},
    "xsa_jax.data": _PLAIN | {"xsa_jax.config"},
    "xsa_jax.train": _PLAIN | {"xsa_jax.config", "xsa_jax.parallel", "xsa_jax.model", "xsa_jax.data"},
    "xsa_jax.compare": _PLAIN | {"xsa_jax.config"},
}
ALLOWED["xsa_jax.selfcheck"] = {"xsa_kernels", "xsa_jax.errors", "xsa_jax.config", "xsa_jax.parallel", "xsa_jax.train"}
ALLOWED["xsa_jax.plan"] = {"xsa_jax.errors", "xsa_jax.config", "xsa_jax.parallel", "xsa_jax.train"}
ALLOWED["xsa_jax.evaluate"] = _PLAIN | {
    "xsa_kernels", "xsa_jax.config", "xsa_jax.parallel", "xsa_jax.model", "xsa_jax.data",
    "xsa_jax.train.checkpoint", "xsa_jax.train.loss", "xsa_jax.train.state", "xsa_jax.train.validate",
}  # fmt: skip

FILES = {
    ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for root in (REPO / "kernels" / "xsa_kernels", REPO / "configs", REPO / "xsa_jax")
    for path in sorted(root.rglob("*.py"))
}


def imported(tree: ast.Module, *, at_import: bool = False) -> set[str]:
    """Dotted names that a module imports; `from a import b` counts as a.b. With `at_import` only what runs when it is imported."""
    nodes = tree.body if at_import else ast.walk(tree)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this repository"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inside(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def part_of(module: str) -> str:
    return max((part for part in ALLOWED if inside(module, part)), key=len)


def ours(name: str) -> bool:
    return name.split(".")[0] in {"xsa_kernels", "configs", "xsa_jax"}


def forbidden(module: str, source: str) -> set[str]:
    part = part_of(module)
    allowed = ALLOWED[part] | ({part} if part != "xsa_jax" else set())
    return {name for name in imported(ast.parse(source)) if ours(name) and not any(inside(name, ok) for ok in allowed)}


@pytest.mark.parametrize("module", FILES)
def test_direction(module):
    assert forbidden(module, FILES[module].read_text()) == set()


def test_the_check_sees_what_it_must():
    assert forbidden("xsa_kernels.api", "from xsa_jax import config") == {"xsa_jax.config"}
    assert forbidden("xsa_jax.config.schema", "from xsa_kernels import api") == {"xsa_kernels.api"}
    assert forbidden("xsa_jax.compare.runs", "from xsa_jax.evaluate import loss") == {"xsa_jax.evaluate.loss"}
    assert forbidden("xsa_jax.errors", "from xsa_jax import files") == {"xsa_jax.files"}
    assert forbidden("xsa_jax.data.loader", "def f():\n    import xsa_jax.model.layers") == {"xsa_jax.model.layers"}
    assert forbidden("xsa_jax.train.loop", "from xsa_jax.evaluate.tasks import run") == {"xsa_jax.evaluate.tasks.run"}
    assert forbidden("xsa_jax.evaluate.loss", "from xsa_jax.train.loop import fit") == {"xsa_jax.train.loop.fit"}
    assert forbidden("xsa_jax.evaluate.loss", "from xsa_jax.train.loss import shift") == set()


def test_no_circle_in_what_is_allowed():
    """Following the allowed imports from a part never leads back to it."""

    def reached(part: str) -> set[str]:
        seen, waiting = set(), [part]
        while waiting:
            for allowed in ALLOWED[part_of(waiting.pop())]:
                if allowed not in seen:
                    seen.add(allowed)
                    waiting.append(allowed)
        return seen

    for part in ALLOWED:
        assert part not in {part_of(found) for found in reached(part)}, part


@pytest.mark.parametrize("module", [module for module in FILES if inside(module, "xsa_kernels")])
def test_kernels_need_only_jax(module):
    """tokamax is an option of one implementation, which imports it when it is called."""
    tree = ast.parse(FILES[module].read_text())
    needed = {"xsa_kernels", "jax", "numpy"}  # numpy comes with jax
    asked_for = {"tokamax"} if module == "xsa_kernels.vendors.tokamax" else set()
    for at_import, allowed in ((True, needed), (False, needed | asked_for)):
        names = {name.split(".")[0] for name in imported(tree, at_import=at_import)}
        assert names - sys.stdlib_module_names <= allowed


WITHOUT_JAX = (
    "xsa_jax.config",
    "xsa_jax.data",
    "xsa_jax.compare",
    "xsa_jax.errors",
    "xsa_jax.files",
    "xsa_kernels.registry",
    "configs",
)


@pytest.mark.parametrize("module", [module for module in FILES if any(inside(module, part) for part in WITHOUT_JAX)])
def test_importing_it_never_imports_jax(module):
    """Data workers import these files, and one that imports jax hangs on an accelerator; configs and comparisons start at once."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if ours(name):
            packages = {".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 2)} & FILES.keys()
            waiting += [found for package in packages for found in imported(_tree(FILES[package]), at_import=True)]
    assert not {name for name in seen if name.split(".")[0] in {"jax", "flax", "optax", "orbax", "tensorboardX"}}


def test_a_process_that_compares_or_reads_a_config_has_not_loaded_jax():
    code = (
        "import sys, xsa_jax.compare.__main__, xsa_jax.config.table, xsa_jax.data.prepare\n"
        "print(*{'jax', 'flax', 'optax', 'orbax'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())
