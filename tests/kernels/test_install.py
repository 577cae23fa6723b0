"""The package installs alone, with jax as its only requirement, and beside Hugging Face's, one of which is named `kernels`."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers import REPO

EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
UNREACHABLE = re.compile(
    r"Failed to establish a new connection|Name or service not known|Temporary failure in name resolution|NameResolutionError"
    r"|NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|Connection refused|Network is unreachable"
)
ALONE = """
import importlib.metadata, importlib.util, re
assert [name for name in ("kernels", "configs", "xsa_jax", "tests") if importlib.util.find_spec(name)] == []
required = [line for line in importlib.metadata.requires("xsa_kernels") if "extra ==" not in line]
assert [re.match(r"\\w+", line)[0] for line in required] == ["jax"], required
"""
BESIDE = """
import importlib.metadata
import transformers, kernels, xsa_kernels
from transformers.utils import is_kernels_available

# This index may lack the versions that this transformers wants, so it is asked for the one that is there.
assert is_kernels_available(MIN_VERSION=importlib.metadata.version("kernels"), MAX_VERSION="1000")
assert not is_kernels_available(MIN_VERSION="999", MAX_VERSION="1000")
assert kernels.get_kernel and not hasattr(kernels, "MaskSpec")
assert len({module.__file__ for module in (transformers, kernels, xsa_kernels)}) == 3
"""


def environment():
    """Ours, without the paths by which this checkout would be importable."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**ours, "JAX_PLATFORMS": "cpu"}


def install(python, *packages):
    """Installs into the environment of another interpreter; skips the test where pip reaches no index."""
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "--retries", "1", *packages]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode and (found := UNREACHABLE.search(done.stderr)):
        pytest.skip(f"pip reaches no index here: {found[0]}")
    assert done.returncode == 0, done.stderr


def run(python, code, folder):
    done = subprocess.run([python, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installs_alone_and_beside_transformers(tmp_path):
    # A build leaves its folders beside the sources: it gets a copy of them.
    sources = shutil.copytree(REPO / "kernels", tmp_path / "sources", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    empty, python = tmp_path / "empty", tmp_path / "venv/bin/python"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    install(python, sources)
    shutil.rmtree(sources)
    run(python, ALONE, empty)
    (example,) = EXAMPLE.findall((REPO / "kernels/README.md").read_text())
    assert re.fullmatch(r"0\.\d+ \(2, 100, 2, 64\)\n", run(python, example, empty))
    install(python, "transformers", "kernels")
    run(python, BESIDE, empty)


def test_the_whole_project_installs_two_names_and_no_others(tmp_path):
    sources = tmp_path / "sources"
    for name in ("kernels", "xsa_jax", "configs", "benchmarks", "tests"):
        shutil.copytree(REPO / name, sources / name, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py", "eval.py"):
        shutil.copy(REPO / name, sources)
    install(sys.executable, "--no-deps", "--target", tmp_path / "installed", sources / "kernels", sources)
    found = {path.name for path in (tmp_path / "installed").iterdir() if not path.name.endswith(".dist-info")}
    assert found == {"xsa_kernels", "xsa_jax"}
