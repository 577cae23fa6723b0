"""What a program sets for its process: memory that is kept, and compiled programs that are kept."""

import pathlib
import platform
import resource
import subprocess
import sys

import pytest

from tests.helpers import subprocess_env

FAULTS = """
import resource
import jax, jax.numpy as jnp
from xsa_jax.parallel.process import keep_freed_memory
if {keeps}:
    keep_freed_memory()
program = jax.jit(lambda x: jnp.outer(x, x))  # 64 MiB
x = jnp.arange(4096.0)
for _ in range(20):
    program(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(6):
    program(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

COMPILED = """
import jax
from xsa_jax.parallel.process import prepare_process
prepare_process()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
print(float(jax.jit(lambda x: x * 3)(2.0)))
"""


def _run(code: str, **env: str) -> str:
    given = subprocess_env(**env)
    if "JAX_COMPILATION_CACHE_DIR" not in env:
        given.pop("JAX_COMPILATION_CACHE_DIR", None)
    return subprocess.run([sys.executable, "-c", code], env=given, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_memory_is_not_taken_anew_for_each_run():
    anew, kept = (int(_run(FAULTS.format(keeps=keeps))) for keeps in (False, True))
    assert anew > 5 * 64 * 2**20 / resource.getpagesize(), "the program takes less memory than the test needs"
    assert kept < anew / 2, (kept, anew)


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path: pathlib.Path):
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    for _ in range(2):
        assert _run(COMPILED, **home) == "6.0"
    (folder,) = (tmp_path / ".cache" / "xsa_jax" / "compiled").iterdir()
    assert folder.name.startswith(platform.machine())
    assert any(path.name.endswith("-cache") for path in folder.iterdir())
    _run(COMPILED, XDG_CACHE_HOME=str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "xsa_jax" / "compiled").is_dir()


@pytest.mark.parametrize("env", [{"JAX_COMPILATION_CACHE_DIR": ""}, {"JAX_ENABLE_COMPILATION_CACHE": "false"}], ids=str)
def test_the_user_can_keep_nothing(env, tmp_path: pathlib.Path):
    assert _run(COMPILED, HOME=str(tmp_path), XDG_CACHE_HOME="", **env) == "6.0"
    assert not any(tmp_path.rglob("*-cache"))


def test_the_user_can_name_the_folder(tmp_path: pathlib.Path):
    _run(COMPILED, HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"))
    assert any((tmp_path / "mine").iterdir())
    assert not (tmp_path / ".cache").exists()
