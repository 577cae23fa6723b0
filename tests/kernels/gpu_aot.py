"""Compiles GPU kernels on a machine without a GPU: `python -m tests.kernels.gpu_aot sm_90 triton` prints a JSON line for each case.

A process of its own, because a plugin that finds no GPU leaves jax in a state that no other test should see.
"""

import functools
import glob
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

NEEDED = {
    "jax_plugins.xla_cuda12": "jax-cuda12-plugin and jax-cuda12-pjrt at jax's version",
    "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
}

TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: 85899345920 shared_memory_per_block_optin: {block_shared}
  cuda_compute_capability {{ {capability} }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  name: "{name}" device_vendor: "NVIDIA Corporation"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
A100 = {
    "name": "NVIDIA A100", "shared": 167936, "block_shared": 166912, "cores": 108, "fpus": 64, "bandwidth": 2039000000000,
    "cache": 41943040, "clock": 1.41, "capability": "major: 8",
}  # fmt: skip
H200 = {
    "name": "NVIDIA H200", "shared": 233472, "block_shared": 232448, "cores": 132, "fpus": 128, "bandwidth": 4800000000000,
    "cache": 52428800, "clock": 1.98, "capability": "major: 9 feature_extension: ACCELERATED_FEATURES",
}  # fmt: skip
ARCHITECTURES = {"sm_80": ("sm_80", A100), "sm_90": ("sm_90a", H200)}

EVERYTHING = {"window": 300, "segments": True, "sinks": True, "softcap": 30.0}
# name: (xsa_kernels.attention's features, E, H, K, T, dtype)
TRITON = {
    "causal 64": ({}, 64, 4, 4, 2048, "bfloat16"),
    "causal 128": ({}, 128, 8, 2, 2048, "bfloat16"),
    "plain 128": ({"xsa": None}, 128, 8, 2, 2048, "bfloat16"),
    "full 128": ({"causal": False}, 128, 4, 1, 2048, "bfloat16"),
    "everything 128": (EVERYTHING, 128, 8, 2, 2000, "bfloat16"),
    "causal 96": ({}, 96, 4, 4, 1000, "float16"),
    "everything 96": (EVERYTHING, 96, 8, 2, 2000, "bfloat16"),
    "causal 256": ({}, 256, 4, 2, 1024, "bfloat16"),
    "float32 64": ({}, 64, 4, 2, 1024, "float32"),
}

HOPPER = {
    "causal 64": ({}, 64, 4, 4, 2048, "bfloat16"),
    "causal 128": ({}, 128, 8, 2, 2048, "bfloat16"),
    "causal 96": ({}, 96, 4, 4, 2048, "bfloat16"),
    "causal 80": ({}, 80, 4, 2, 2048, "bfloat16"),
    "plain 128": ({"xsa": None}, 128, 8, 2, 2048, "bfloat16"),
    "full 128": ({"causal": False}, 128, 4, 1, 2048, "float16"),
    "segments 128": ({"segments": True}, 128, 8, 2, 2000, "bfloat16"),
    "everything 64": (EVERYTHING, 64, 8, 2, 2048, "float16"),
    "everything 128": (EVERYTHING, 128, 8, 2, 2001, "bfloat16"),
    "capped segments 128": ({"segments": True, "softcap": 30.0}, 128, 8, 2, 2048, "bfloat16"),
    "band 128": ({"causal": False, "window": 300}, 128, 8, 2, 2001, "bfloat16"),
    "full everything 128": (EVERYTHING | {"causal": False}, 128, 8, 2, 2001, "float16"),
    "odd 128": ({}, 128, 8, 2, 2001, "bfloat16"),
    "window 128": ({"window": 300, "sinks": True, "softcap": 30.0}, 128, 8, 2, 2048, "bfloat16"),
}


def missing() -> str:
    """What to install before anything can be compiled; empty when nothing is missing."""

    def found(name):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return ", ".join(package for name, package in NEEDED.items() if not found(name))


def nvcc() -> pathlib.Path:
    return pathlib.Path(importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations[0])


def compile_for(architecture, fn, arguments):
    """Compiles fn(*arguments), the arguments ShapeDtypeStructs or None. The result cannot be run here."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([_device(architecture)]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    # From jax 0.12 on Pallas-Triton asks the mesh, by the device's name, what it compiles for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn).trace(*placed).lower(lowering_platforms=("cuda",)).compile()


@functools.cache
def _device(architecture):
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    xla_bridge.discover_pjrt_plugins()
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    target = TARGET.format(**ARCHITECTURES[architecture][1])
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1").devices[0]


def vjp_of(backend, features, E, H, K, T, dtype):
    """(z, gradients) as a function, and its arguments."""
    import jax
    import jax.numpy as jnp

    from xsa_kernels import MaskSpec, Projection, frame
    from xsa_kernels.request import make_request

    def both(q, k, v, dz, segment_ids, sinks):
        mask = MaskSpec(features.get("causal", True), features.get("window"), segment_ids)

        def attend(q, k, v):
            xsa, softcap = features.get("xsa", Projection()), features.get("softcap")
            request = make_request(q, k, v, mask=mask, xsa=xsa, scale=E**-0.5, sinks_H=sinks, softcap=softcap)
            return frame.attention(backend, request, None)

        z, vjp = jax.vjp(attend, q, k, v)
        return z, vjp(dz)

    def shape(*dims, of=dtype):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(of))

    ids = shape(2, T, of="int32") if features.get("segments") else None
    sinks = shape(H, of="float32") if features.get("sinks") else None
    return both, (shape(2, T, H, E), shape(2, T, K, E), shape(2, T, K, E), shape(2, T, H, E), ids, sinks)


def resources(report: str) -> dict:
    """Registers and bytes spilled by each kernel, from what ptxas says."""
    names = re.findall(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for", report)
    registers, spills = re.findall(r"Used (\d+) registers", report), re.findall(r"(\d+) bytes spill stores, .*\n.*Used", report)
    return {n: {"registers": int(r), "spilled": int(s)} for n, r, s in zip(names, registers, spills, strict=True)}


def assemble(ptx: str, architecture: str) -> str:
    command = [nvcc() / "bin" / "ptxas", "-v", f"-arch={ARCHITECTURES[architecture][0]}", ptx, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main(architecture: str, kind: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_ROOT"] = str(nvcc())
    os.environ["PATH"] = f"{nvcc()}/bin:" + os.environ["PATH"]
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={nvcc()} --xla_dump_to={dump} --xla_dump_emitter_re=ptx"
        from xsa_kernels.gpu import hopper, triton

        backend, cases = {"triton": (triton.backend(), TRITON), "hopper": (hopper.backend(), HOPPER)}[kind]
        for case, (features, *sizes) in cases.items():
            memory = compile_for(architecture, *vjp_of(backend, features, *sizes)).memory_analysis()
            found: dict = {}
            for ptx in map(pathlib.Path, glob.glob(f"{dump}/*.ptx")):
                if re.search(r"\.entry (attention|xsa)_", ptx.read_text()):
                    found |= resources(assemble(str(ptx), architecture))
                ptx.unlink()
            print(json.dumps({"case": case, "temporary_bytes": memory.temp_size_in_bytes, "kernels": found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
