"""The real train step compiles, with the options for the chip, for a TPU slice that is not here.

Run as a program it compiles for one topology, SA and XSA.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.helpers import subprocess_env

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}

# `make gates` installs libtpu and requires it: there a gate that finds none fails.
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and "GATES" not in os.environ,
    reason='install libtpu: pip install "jax[tpu]", or run make gates',
)


@needs_libtpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_the_train_step_compiles(chip):
    env = subprocess_env(
        TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0"
    )
    env.pop("XLA_FLAGS", None)  # those of the tests: they tell the compiler not to optimise
    command = [sys.executable, "-m", "tests.train.test_topology", TOPOLOGIES[chip]]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["sa", "attention_forward", "xsa", "xsa_forward"], done.stdout


def main(topology: str) -> None:
    from jax.experimental import topologies

    from xsa_jax.config import Config, from_config_dict, to_dict
    from xsa_jax.train.setup import assemble

    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    for kind in ("sa", "xsa"):
        tree = to_dict(Config())
        tree["model"] |= {"num_layers": 2, "d_model": 256, "d_ff": 512, "vocab_size": 1024, "remat": "attention"}
        tree["attention"] |= {"kind": kind, "num_heads": 4, "num_kv_heads": 4, "head_dim": 128}
        tree["data"] |= {"seq_len": 512, "batch_size": 4}
        tree["mesh"] |= {"fsdp": 2, "tensor": 2}
        text = assemble(from_config_dict(tree), devices).compile().as_text()
        (kernel,) = {name for name in ("attention_forward", "xsa_forward") if name in text}
        print(kind, kernel, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
