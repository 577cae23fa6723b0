"""`python -m xsa_jax.plan` with the compilers of `make gates`: plans that add up, a search, and runs that do not fit."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import REPO, subprocess_env
from tests.train.test_topology import needs_libtpu

SMALL = [
    "--config=configs/paper.py:0p7b", "--config.attention.kind=xsa", "--config.model.num_layers=2", "--config.model.d_model=512",
    "--config.model.d_ff=2048", "--config.attention.num_heads=4", "--config.attention.num_kv_heads=4",
    "--config.model.vocab_size=1024", "--config.data.batch_size=8", "--config.data.seq_len=1024",
]  # fmt: skip
WEIGHTS = 2 * (4 * 512 * 512 + 2 * 512 * 2048) + 1024 * 512


def run(*arguments: str) -> subprocess.CompletedProcess:
    env = subprocess_env()
    env.pop("XLA_FLAGS", None)  # those of the tests: they tell the compiler not to optimise
    command = [sys.executable, "-m", "xsa_jax.plan", *SMALL, *arguments]
    return subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True)


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "tpu7x:2x2x1", "h200:4"])
def test_a_plan_adds_up(topology, tmp_path):
    done = run(f"--topology={topology}", f"--json={tmp_path / 'plan.json'}", "--mesh=fsdp=4")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    vectors = 6 * 512  # the scales of norms, which each device holds
    assert plan["memory"]["parameters"] == 4 * (WEIGHTS / 4 + vectors)
    assert plan["memory"]["optimiser"] == pytest.approx(2 * plan["memory"]["parameters"], abs=64)
    assert plan["memory"]["needed"] >= plan["memory"]["temporaries"] + 3 * plan["memory"]["parameters"]
    gathered = sum(row["wire"] for row in plan["collectives"] if row["kind"] == "all-gather")
    # bfloat16, at least once forward and once backward, except the table; 3/4 of each array comes from others.
    assert gathered >= 0.75 * 2 * (2 * WEIGHTS - 1024 * 512)
    if topology.startswith("tpu7x"):
        assert "not predicted, since the clock of this chip is not published" in done.stdout
    else:
        assert 0 < plan["mfu"] < plan["hfu"] <= 1.001
        assert f"MFU {100 * plan['mfu']:.1f}% (causal)" in done.stdout
        assert plan["step"] == pytest.approx(max(sum(plan["seconds"].values()), plan["wire_seconds"]))


@pytest.mark.long
@needs_libtpu
def test_a_search_ranks_what_fits():
    done = run("--topology=v5e:2x2", "-search", "--json", "unused.json")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["data", "fsdp", "tensor", "remat", "step", "MFU", "GiB"]
    ranked = [row.split() for row in rows if not row.startswith("not planned")]
    assert {(row[0], row[1]) for row in ranked} == {("4", "1"), ("2", "2"), ("1", "4")}
    times = [float(row[4]) for row in ranked]
    assert times == sorted(times)


@pytest.mark.long
@needs_libtpu
def test_a_run_that_does_not_fit_is_one_line():
    large = ["--config.data.batch_size=4096", "--config.model.num_layers=48"]
    cases = (
        (large, "no policy fits the 15.8 GiB"), (["--mesh=fsdp=8"], "mesh.fsdp=8"),
        ([*large, "--config.model.remat=none"], "the step does not fit: RESOURCE_EXHAUSTED"),
    )  # fmt: skip
    for arguments, message in cases:
        done = run("--topology=v5e:2x2", *arguments)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]


@pytest.mark.skipif("GATES" in os.environ, reason="the compilers are here")
def test_what_to_install_is_one_line():
    done = run("--topology=v5e:2x2")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the compiler for TPUs is not installed: `make plan` installs it")
