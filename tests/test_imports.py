"""Imports run one way, so that each part can be read, tested and reused without those above it."""

import ast
import pathlib
import sys

import pytest

from tests.helpers import REPO

pytestmark = pytest.mark.fast

# Part -> the parts of this repository that it may import, itself left out. A file belongs to the longest name that fits.
ALLOWED = {
    "xsa_kernels": set(),
    "configs": set(),
    "xsa_jax": set(),
    "xsa_jax.config": {"xsa_jax.mesh"},
    "xsa_jax.mesh": {"xsa_jax.config"},
    "xsa_jax.model": {"xsa_kernels", "xsa_jax.config", "xsa_jax.mesh"},
    "xsa_jax.data": {"xsa_jax.config", "xsa_jax.mesh"},
    "xsa_jax.train": {"xsa_jax.config", "xsa_jax.mesh", "xsa_jax.model", "xsa_jax.data"},
}
_READERS = {
    "xsa_kernels", "xsa_jax.config", "xsa_jax.mesh", "xsa_jax.model", "xsa_jax.data",
    "xsa_jax.train.checkpoint", "xsa_jax.train.loss", "xsa_jax.train.state", "xsa_jax.train.validate",
}  # fmt: skip
ALLOWED["xsa_jax.evaluate"] = _READERS | {"xsa_jax.analyze.labels"}
ALLOWED["xsa_jax.analyze"] = _READERS

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
    assert forbidden("xsa_jax.data.loader", "def f():\n    import xsa_jax.model.layers") == {"xsa_jax.model.layers"}
    assert forbidden("xsa_jax.train.loop", "from xsa_jax.evaluate.tasks import run") == {"xsa_jax.evaluate.tasks.run"}
    assert forbidden("xsa_jax.evaluate.loss", "from xsa_jax.train.loop import fit") == {"xsa_jax.train.loop.fit"}
    assert forbidden("xsa_jax.evaluate.loss", "from xsa_jax.train.loss import split") == set()


@pytest.mark.parametrize("module", [module for module in FILES if inside(module, "xsa_kernels")])
def test_kernels_need_only_jax(module):
    """tokamax is an option of one implementation, which imports it when it is called."""
    tree = ast.parse(FILES[module].read_text())
    needed = {"xsa_kernels", "jax", "numpy"}  # numpy comes with jax
    asked_for = {"tokamax"} if module == "xsa_kernels.tokamax" else set()
    for at_import, allowed in ((True, needed), (False, needed | asked_for)):
        names = {name.split(".")[0] for name in imported(tree, at_import=at_import)}
        assert names - sys.stdlib_module_names <= allowed


@pytest.mark.parametrize("module", [module for module in FILES if inside(module, "xsa_jax.data")])
def test_importing_data_never_imports_jax(module):
    """Worker processes import these files; a worker that imports jax hangs on an accelerator."""
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


def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())
