"""Every TPU kernel compiles for every generation, on a machine that has no TPU. Run as a program it compiles them for one chip."""

import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys

import pytest

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
MASKS = ("causal", "window", "segments")
HEADS = {"MHA": (2, 2), "GQA": (4, 1)}
REPO = pathlib.Path(__file__).resolve().parents[2]

# `make gates` installs libtpu and requires it: there a gate that finds none fails.
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and "GATES" not in os.environ,
    reason='install libtpu: pip install "jax[tpu]", or run make gates',
)


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_forward_and_backward_compile(chip):
    path = f"{REPO}{os.pathsep}{REPO / 'kernels'}"
    env = dict(os.environ, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", PYTHONPATH=path)
    env.pop("XLA_FLAGS", None)  # those of the tests: they tell the compiler not to optimise
    done = subprocess.run([sys.executable, __file__, chip], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["compiled", str(len(MASKS) * len(HEADS) * 2 + 3)], done.stdout


def main(chip: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from xsa_kernels import MaskSpec, Projection, attention, frame, tpu
    from xsa_kernels.request import make_request

    mesh = Mesh(np.array(topologies.get_topology_desc(topology_name=CHIPS[chip], platform="tpu").devices[:1]), ("data",))
    small = tpu.Blocks(256, 256, 256, 128)
    # Small blocks compile fast and hold every instruction; three calls at the sizes of the table show that those fit the memory.
    narrow, wide = jnp.bfloat16, jnp.float32
    cases = [(mask, *HEADS[heads], E, 512, narrow, small) for mask, heads, E in itertools.product(MASKS, HEADS, (64, 128))]
    cases += [("segments", 8, 1, 128, 4096, narrow, None), ("causal", 32, 1, 256, 2048, narrow, None)]
    cases += [("causal", 8, 1, 128, 4096, wide, None)]
    for mask, H, K, E, T, dtype, blocks in cases:

        def gradients(q, k, v, dz, ids, mask=mask, blocks=blocks):
            spec = MaskSpec(window=200 if mask == "window" else None, segment_ids=ids if mask == "segments" else None)

            def attend(q, k, v):
                if blocks is None:  # by the public function, which sees that the mesh is of TPUs and interprets nothing
                    return attention(q, k, v, mask=spec, xsa=Projection(), scale=0.1, impl="tpu")
                request = make_request(q, k, v, mask=spec, xsa=Projection(), scale=0.1)
                return frame.attention(tpu.backend(blocks, blocks), request, None)

            z, pull = jax.vjp(attend, q, k, v)
            return z, *pull(dz)

        def array(*shape, dtype):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

        q, k, ids = array(1, T, H, E, dtype=dtype), array(1, T, K, E, dtype=dtype), array(1, T, dtype=jnp.int32)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(gradients).trace(q, k, k, q, ids).lower(lowering_platforms=("tpu",)).compile()
    print("compiled", len(cases))


if __name__ == "__main__":
    main(sys.argv[1])
