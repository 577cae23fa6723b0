"""Does this machine train? The first command on a new machine, and on every host of a new pod or cluster.

    python -m xsa_jax.selfcheck

It prints the devices, the mesh and the attention implementation that `auto` picks, compares its values and gradients with the
reference, and trains a small model on random tokens for some steps. It writes nothing. Status 1 says that something is wrong.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xsa_kernels
from xsa_jax.config import Config, from_config_dict, to_dict
from xsa_jax.errors import UserError
from xsa_jax.parallel import distributed
from xsa_jax.parallel.lifeline import Lifeline
from xsa_jax.parallel.mesh import describe, platform
from xsa_jax.parallel.process import prepare_process
from xsa_jax.train.flops import peak_flops
from xsa_jax.train.setup import assemble
from xsa_jax.train.step_time import Stepper

# Rounding of bfloat16 leaves at most this relative error, root mean square; a wrong kernel leaves some ten times as much.
_LARGEST_ERROR = 0.02


def small_config(accelerator: bool, num_devices: int) -> Config:
    """A model that trains for some steps in seconds: 40M parameters on an accelerator, 0.4M elsewhere."""
    tree = to_dict(Config())
    if accelerator:
        tree["model"] |= {"num_layers": 8, "d_model": 512, "d_ff": 2048, "vocab_size": 32_768}
        tree["attention"] |= {"num_heads": 4, "num_kv_heads": 4, "head_dim": 128}
        tree["data"] |= {"seq_len": 1024, "batch_size": 8 * num_devices}
    else:
        tree["model"] |= {"num_layers": 2, "d_model": 128, "d_ff": 512, "vocab_size": 256, "dtype": "float32"}
        tree["attention"] |= {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
        tree["data"] |= {"seq_len": 128, "batch_size": num_devices}
    tree["attention"]["kind"] = "xsa"
    tree["optim"] |= {"warmup_steps": 1, "peak_lr": 1e-3}
    tree["train"] |= {"num_steps": 1000}
    return from_config_dict(tree)


def kernel_error(config: Config) -> tuple[str, float]:
    """The attention implementation for one device of this process, and its relative error against the reference.

    The error is the root mean square over XSA's output and its gradients by q, k and v, in the compute type of the config, against
    the reference in float32.
    """
    attention, data = config.attention, config.data
    shape = 1, data.seq_len, attention.num_heads, attention.head_dim
    dtype = jnp.dtype(config.model.dtype)
    q, k, v, dz = (jax.random.normal(key, shape).astype(dtype) for key in jax.random.split(jax.random.key(0), 4))
    features = xsa_kernels.Features(dtype=config.model.dtype, head_dim=attention.head_dim, lengths=(data.seq_len, data.seq_len))
    device = jax.local_devices()[0]
    found = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    name: Any = xsa_kernels.check("auto", features, device=found)

    def values(impl: Any, *arrays: jax.Array) -> list[np.ndarray]:
        @jax.jit
        def run(q: jax.Array, k: jax.Array, v: jax.Array, dz: jax.Array) -> tuple[jax.Array, ...]:
            z, pullback = jax.vjp(lambda *qkv: xsa_kernels.attention(*qkv, xsa=xsa_kernels.Projection(), impl=impl), q, k, v)
            return z, *pullback(dz)

        return [np.asarray(x, np.float64) for x in run(*arrays)]

    with jax.default_device(device):
        measured = values(name, q, k, v, dz)
        expected = values("reference", *(x.astype(jnp.float32) for x in (q, k, v, dz)))
    errors = [np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) for a, b in zip(measured, expected, strict=True)]
    return name, float(max(errors))


def check(steps: int) -> None:
    """Prints what there is and how it works.

    Args:
      steps: number of train steps that are timed.

    Raises:
      UserError: the values are wrong, or the loss does not fall.
    """
    devices = jax.devices()
    print(f"{describe(devices)}, {jax.process_count()} processes, jax {jax.__version__}", flush=True)
    config = small_config(devices[0].platform != "cpu", len(devices))
    name, error = kernel_error(config)
    print(
        f"attention: {name}, at most {100 * error:.2f}% from the reference (forward and backward, {config.model.dtype})", flush=True
    )
    if not error < _LARGEST_ERROR:
        raise UserError(f"attention {name}: {100 * error:.2f}% from the reference, expected less than {100 * _LARGEST_ERROR:g}%")
    stepper = Stepper(assemble(config))
    setup = stepper.setup
    print(f"mesh: {dict(setup.mesh.shape)} on {platform(setup.mesh)}, {setup.num_parameters:,} parameters", flush=True)
    seconds, first = [stepper.seconds()], stepper.loss
    print(f"loss at the first step: {first:.3f}, ln V is {math.log(config.model.vocab_size):.3f}", flush=True)
    seconds += [stepper.seconds() for _ in range(steps)]
    median = statistics.median(seconds[len(seconds) // 2 :])
    tokens = config.data.batch_size * config.data.seq_len
    flops = setup.flops_per_token.model * tokens
    peak = peak_flops(devices[0].device_kind, config.model.dtype)
    mfu = f"{100 * flops / median / peak / len(devices):.1f}%" if peak else "unknown for this device and type"
    print(f"{steps} steps: {1e3 * median:.1f} ms a step, {tokens / median:,.0f} tokens/s, MFU {mfu}; loss {stepper.loss:.3f}")
    if not stepper.loss < first:
        raise UserError(f"the loss went from {first:.3f} to {stepper.loss:.3f} on tokens that repeat; expected it to fall")
    print("this machine trains")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m xsa_jax.selfcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="number of train steps (%(default)s)")
    parser.add_argument("--coordinator", help="host:port of process 0, where jax detects no cluster")
    parser.add_argument("--num_processes", type=int, help="number of processes")
    parser.add_argument("--process_id", type=int, help="index of this process, from 0")
    args = parser.parse_args(argv)
    prepare_process()
    try:
        distributed.start(args.coordinator, args.num_processes, args.process_id)
        with Lifeline():
            distributed.only_first_prints()
            check(args.steps)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
