"""The benchmark against PyTorch does the same work on both sides; that is proven where PyTorch is installed."""

import subprocess
import sys

import pytest

from tests.helpers import REPO, subprocess_env


def test_both_sides_make_the_same_losses(tmp_path):
    pytest.importorskip("torch", reason="pip install torch")
    command = [sys.executable, str(REPO / "benchmarks" / "versus_torch.py"), "--shapes=demo", "--lengths=64", "--pairs=1"]
    env = {**subprocess_env(), "OMP_NUM_THREADS": "1"}
    env.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [*command, "--contenders=ours,eager", f"--out={tmp_path / 'out.json'}"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| demo | 64 | step | xsa | eager |" in done.stdout
