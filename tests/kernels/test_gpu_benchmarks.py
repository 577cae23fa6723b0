"""What is sent to a GPU runs: all of `benchmarks/device.sh`, tiny and on the CPU, without the packages that such machines lack.

And the tables of `kernels/README.md` are what one run of the benchmarks stored.
"""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import accuracy, tpu_bundles, train_step
from configs import paper
from tests.helpers import REPO, subprocess_env
from xsa_jax.config import from_config_dict


@pytest.mark.parametrize("kind", ["sa", "xsa"])
def test_the_step_that_is_timed_is_the_papers(kind):
    config = paper.get_config("0p7b")
    config.attention.kind = kind
    assert train_step.config_of(kind, "auto", 256, tiny=False) == from_config_dict(config)


@pytest.mark.long
def test_device_script(tmp_path):
    for absent in ("grain", "ml_collections", "orbax"):
        (tmp_path / absent).mkdir()
        (tmp_path / absent / "__init__.py").write_text("raise ImportError('not on this machine')\n")
    env = subprocess_env(PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        ["sh", REPO / "benchmarks/device.sh", tmp_path / "out"], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CANNOT IMPORT" not in done.stdout
    kernels = json.loads((tmp_path / "out/gpu_kernels.json").read_text())
    values = [row for row in kernels["rows"] if "wrong" in row]
    assert {row["implementation"] for row in values} == {"triton sa", "triton xsa", "xla sa", "xla xsa"}
    assert not any(row["wrong"] for row in values)
    timed = [row for row in kernels["rows"] if "ms" in row]
    assert len(timed) == 2 * len(values)
    # One float32 number for each of 128 tokens and 2 heads is all that XSA keeps beyond plain attention.
    kept = {row["implementation"]: row["residual MB"] * 2**20 for row in timed}
    assert kept["triton xsa"] - kept["triton sa"] == 128 * 2 * 4
    steps = json.loads((tmp_path / "out/gpu_train_step.json").read_text())
    assert {row["kind"] for row in steps["rows"]} == {"sa", "xsa"}
    assert all(row["ms"] > 0 and 4 < row["loss"] < 7 for row in steps["rows"])


@pytest.mark.fast
def test_stored_costs_meet_the_target():
    """The projection costs at most 4% of the same kernel without it, and both together at most 5% more than jax's splash."""
    for chip, rows in json.loads((REPO / "benchmarks/results/tpu_bundles.json").read_text())["chips"].items():
        for direction in ("forward", "backward"):
            cost = rows[direction]["kernels"]
            assert cost["xsa"] <= 1.04 * cost["plain"], (chip, direction)
            assert cost["xsa"] <= 1.05 * cost["splash"], (chip, direction)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("stored", "part", "table"), [("cpu_accuracy", "rows", accuracy.table), ("tpu_bundles", "chips", tpu_bundles.table)]
)
def test_readme_has_the_table_that_was_stored(stored, part, table):
    result = json.loads((REPO / f"benchmarks/results/{stored}.json").read_text())
    assert table(result[part]) in (REPO / "kernels/README.md").read_text()


def test_stored_cost_is_of_a_pinned_compiler():
    """With another libtpu `make gates` has nothing to compare with: store the costs anew when the lock changes."""
    stored = json.loads((REPO / "benchmarks/results/tpu_bundles.json").read_text())["versions"]
    lock = (REPO / "requirements-gates.lock").read_text()
    assert re.search(rf"^libtpu=={re.escape(stored['libtpu'])} ; python_full_version < '3.12'", lock, re.MULTILINE)
    assert re.search(rf"^jax=={re.escape(stored['jax'])} ; python_full_version < '3.12'", lock, re.MULTILINE)


@pytest.mark.long
def test_accuracy_has_every_column(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "PULLS", (7.0,))
    out = tmp_path / "accuracy.json"
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--length", "128", "--head-dim", "64", "--out", str(out)])
    accuracy.main()
    rows = json.loads(out.read_text())["rows"]
    assert capsys.readouterr().out.endswith(accuracy.table(rows) + "\n")
    worst: dict[str, float] = {}
    for row in rows:
        worst[row["implementation"]] = max(worst.get(row["implementation"], 0), *(row[name] for name in accuracy.RESULTS))
    assert list(worst) == ["unfused", "xla", "splash", "tpu", "triton"]
    # What rounds y before the projection loses where tokens attend to themselves; the others do not.
    assert all((error > 2) == (name in ("unfused", "splash")) and error > 0.1 for name, error in worst.items()), worst
