"""The stored plans: what they promise holds, and docs/pods.md has their table."""

import json

import pytest

from benchmarks import plans
from tests.helpers import REPO

pytestmark = pytest.mark.fast
STORED = json.loads((REPO / "benchmarks/results/plans.json").read_text())

# Largest GB that a device sends in a step, and least MFU in percent.
TARGETS = {
    "0p7b@v5e:4x4": (6.0, 53), "0p7b@v5e:16x16": (4.8, 52), "2p7b@v5e:16x16": (17, 66), "1p3b@v5p:4x4x4": (9, 59),
    "1p3b@v6e:8x8": (7.5, 39),
}  # fmt: skip


def test_the_page_has_the_table():
    assert plans.table(STORED) in plans.PAGE.read_text(), "run python benchmarks/plans.py --table benchmarks/results/plans.json"


@pytest.mark.parametrize("case", TARGETS)
def test_bytes_and_mfu(case):
    if case not in STORED["plans"]:
        pytest.skip("not planned yet; the page says so")
    plan, (gigabytes, percent) = STORED["plans"][case], TARGETS[case]
    assert plans.numbers(plan)["wire"] <= 1e9 * gigabytes
    assert 100 * plan["mfu"] >= percent


def test_a_step_with_xsa_takes_at_most_one_percent_more():
    plain = [case for case in STORED["plans"] if case.endswith("@sa")]
    if not plain:
        pytest.skip("not planned yet; the page says so")
    for case in plain:
        assert STORED["plans"][case.removesuffix("@sa")]["step"] <= 1.01 * STORED["plans"][case]["step"], case


def test_more_than_the_slack_is_named():
    plan = STORED["plans"]["0p7b@v5e:16x16"]
    assert plans.worse(plan, plan) == []
    assert plans.worse(plan | {"step": 1.029 * plan["step"]}, plan) == []
    (line,) = plans.worse(plan | {"step": 1.04 * plan["step"]}, plan)
    assert line.startswith("step is ")
    assert plans.worse({"error": "no"}, plan) == ["no, stored None"]
    assert plans.worse({"error": "no"}, {"error": "no"}) == []
    assert plans.worse(plan, None) == ["no plan is stored; run with --out"]
