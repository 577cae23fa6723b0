"""The README of `kernels` is true: its example runs, and each cell of its support table is what `check` answers."""

import pathlib
import re
import subprocess
import sys

import pytest

import kernels
from kernels.api import IMPLEMENTATIONS
from tests.helpers import subprocess_env

README = (pathlib.Path(kernels.__file__).parent / "README.md").read_text()

FEATURES = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 8},
    "window, not causal": {"window": 8, "causal": False},
    "segment ids": {"segments": True},
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 30.0},
    "fewer queries than keys, causal": {"tail": True},
    "float32": {"dtype": "float32"},
    "head dim 80": {"head_dim": 80},
    "head dim 36": {"head_dim": 36},
}


def support_table():
    rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in README.splitlines() if line.startswith("|")]
    start = next(n for n, row in enumerate(rows) if row[0] == "feature")
    return rows[start][1:], {row[0]: row[1:] for row in rows[start + 2 : start + 2 + len(FEATURES)]}


def honours(impl, feature):
    try:
        return kernels.check(impl, **{"dtype": "bfloat16", "head_dim": 64, **feature}) == impl
    except ValueError:
        return False


@pytest.mark.fast
def test_support_table_is_what_check_answers():
    names, table = support_table()
    assert names == list(IMPLEMENTATIONS)
    assert table == {
        feature: ["yes" if honours(impl, options) else "no" for impl in names] for feature, options in FEATURES.items()
    }


def test_example_runs_on_its_own():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 15
    done = subprocess.run([sys.executable, "-c", example], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert re.fullmatch(r"0\.\d+ \(2, 100, 2, 64\)\n", done.stdout)
