"""The README of `kernels` is true: its example runs, its support table and its signatures are those of the code."""

import inspect
import re
import subprocess
import sys

import pytest

import xsa_kernels
from tests.helpers import REPO, subprocess_env
from xsa_kernels import registry

README = (REPO / "kernels" / "README.md").read_text()


@pytest.mark.fast
def test_support_table_is_the_data():
    assert registry.table() in README


@pytest.mark.fast
@pytest.mark.parametrize("name", ["attention", "check", "project", "weights"])
def test_signatures(name):
    (written,) = re.findall(rf"`{name}\(([^`]*)\) -> \w+`", README)
    parameters = inspect.signature(getattr(xsa_kernels, name)).parameters.values()
    assert re.findall(r"(\w+)(?:=[^,]*)?(?:, |$)", written) == [parameter.name for parameter in parameters]


def test_example_runs_on_its_own():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 15
    done = subprocess.run([sys.executable, "-c", example], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert re.fullmatch(r"0\.\d+ \(2, 100, 2, 64\)\n", done.stdout)
