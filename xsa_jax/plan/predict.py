"""The plan of one run: its train step compiled for devices that are not here, and what follows for memory, wire and time."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from xsa_jax.config import Config
from xsa_jax.errors import UserError
from xsa_jax.parallel import hlo
from xsa_jax.parallel.mesh import platform
from xsa_jax.plan.kernels import kernel_cycles
from xsa_jax.plan.topology import chip_of, devices_of, ring_bandwidth
from xsa_jax.train.setup import Setup, assemble, device_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is expected to need, per device unless stated otherwise.

    Attributes:
      topology: name of the devices.
      devices: number of devices.
      mesh: sizes of the mesh axes.
      remat: policy of recomputation.
      loss_chunk_tokens: tokens whose logits are in memory at once.
      options: options of the compiler.
      memory: bytes by kind. "needed" is the sum of the others, without what lies in the host's memory.
      available: bytes of device memory.
      cycles: XLA's estimate of cycles in fusions, and those of the attention kernels; 0 on GPUs.
      program: what the compiled step does.
      seconds: predicted seconds of a step by part: "fusions" and "kernels", or "products" on GPUs, and "waiting" for collectives.
      wire_seconds: seconds that all collectives take on the links, most of them beside computation.
      tokens: tokens of a step over all devices.
      num_steps: steps of the run.
      mfu: model FLOPs over the peak of the devices, in the predicted time.
      hfu: the same for the FLOPs that the devices compute.
      compile_seconds: time of all compilations, with those of `model.remat=auto`.
    """

    topology: str
    devices: int
    mesh: Mapping[str, int]
    remat: str
    loss_chunk_tokens: int
    options: Mapping[str, Any]
    memory: Mapping[str, int]
    available: float
    cycles: Mapping[str, float]
    program: hlo.Program
    seconds: Mapping[str, float]
    wire_seconds: float
    tokens: int
    num_steps: int
    mfu: float
    hfu: float
    compile_seconds: float

    @property
    def step(self) -> float:
        """Predicted seconds of a step: computation or, where that is longer, the wire, and the waiting."""
        return max(sum(self.seconds.values()), self.wire_seconds)

    @property
    def bound(self) -> str:
        """What takes the largest part of a step."""
        if self.wire_seconds > sum(self.seconds.values()):
            return "links: collectives take longer than what runs beside them"
        names = {
            "fusions": "matrix products and elementwise work outside attention",
            "kernels": "attention kernels",
            "products": "matrix products",
            "waiting": "collectives that nothing hides",
        }
        return names[max(self.seconds, key=lambda part: self.seconds[part])]

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON holds it, with collectives summed by kind."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "program"}
        return values | {"step": self.step, "bound": self.bound, "collectives": summed(self.program)}


def summed(program: hlo.Program) -> list[dict[str, Any]]:
    """The collectives by kind, type, place and whether the device waits, the largest first."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for c in program.collectives:
        entry = sums.setdefault((c.kind, c.dtype, c.group, c.in_loop, c.synchronous), [0, 0.0])
        entry[0] += c.times
        entry[1] += c.wire
    names = ("kind", "dtype", "group", "in_loop", "synchronous")
    rows = [dict(zip(names, key, strict=True)) | {"times": int(n), "wire": wire} for key, (n, wire) in sums.items()]
    return sorted(rows, key=lambda row: -row["wire"])


def plan(config: Config, topology: str) -> Plan:
    """Compiles the train step of a config for a topology, and predicts what it needs.

    The time of a step on TPUs is (XLA's cycles + the kernels' bundles) / clock, and the bytes of synchronous collectives over the
    links of their group. On GPUs it is the FLOPs that the devices compute at their peak, which no program reaches, and the same for
    collectives.

    Raises:
      UserError: the topology is not known, the compiler is not installed, the config does not fit the devices, or the step does not
        fit their memory.
    """
    devices = devices_of(topology)
    if devices[0].platform != "tpu" and config.attention.impl == "auto":
        # `auto` asks cuDNN, which is not here, whether it knows the shapes.
        config = dataclasses.replace(config, attention=dataclasses.replace(config.attention, impl="triton"))
    started = time.perf_counter()
    setup = assemble(config, devices)
    try:
        compiled = setup.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"{topology}: the step does not fit: {str(error).splitlines()[0][:300]}") from None
    seconds = time.perf_counter() - started
    needed, stated = device_bytes(compiled), chip_of(devices)
    if needed > stated.memory:
        raise UserError(f"{topology}: the step does not fit: {needed / 2**30:.1f} GiB of {stated.memory / 2**30:.1f} GiB")
    program = hlo.read(compiled.as_text() or "")
    return predicted(setup, topology, compiled, program, seconds)


def predicted(
    setup: Setup, topology: str, compiled: jax.stages.Compiled, program: hlo.Program, compile_seconds: float
) -> Plan:  # fmt: skip
    """The plan of a run whose step is compiled."""
    config, mesh = setup.config, setup.mesh
    devices = list(mesh.devices.flat)
    stated, kind = chip_of(devices), devices[0].device_kind
    tokens = config.data.batch_size * config.data.seq_len
    flops = setup.flops_per_token
    cycles: dict[str, float] = {}
    if platform(mesh) == "tpu":
        cycles = {"fusions": program.cycles, "kernels": sum(kernel_cycles(kernel, kind) for kernel in program.kernels)}
        clock = stated.clock or math.nan
        parts = {name: n / clock for name, n in cycles.items()}
    else:
        parts = {"products": flops.hardware * tokens / len(devices) / stated.flops}
    rings = _rings(mesh)
    parts["waiting"] = sum(c.wire / _bandwidth(rings, c.group) for c in program.collectives if c.synchronous)
    wire_seconds = sum(c.wire / _bandwidth(rings, c.group) for c in program.collectives)
    per_device = tokens / max(sum(parts.values()), wire_seconds) / len(devices)
    return Plan(
        topology=topology,
        devices=len(devices),
        mesh=dict(mesh.shape),
        remat=setup.model.config.remat,
        loss_chunk_tokens=config.train.loss_chunk_tokens,
        options=setup.compiler_options,
        memory=_memory(setup, compiled),
        available=stated.memory,
        cycles=cycles,
        program=program,
        seconds=parts,
        wire_seconds=wire_seconds,
        tokens=tokens,
        num_steps=config.train.num_steps,
        mfu=per_device * flops.model / stated.flops,
        hfu=per_device * flops.hardware / stated.flops,
        compile_seconds=compile_seconds,
    )


def _memory(setup: Setup, compiled: jax.stages.Compiled) -> dict[str, int]:
    def here(tree: Any) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    analysis: Any = compiled.memory_analysis()
    return {
        "parameters": here(setup.abstract_state.params),
        "optimiser": here(setup.abstract_state.opt_state),
        "batch": here(setup.abstract_batch()),
        "temporaries": analysis.temp_size_in_bytes,
        "program": analysis.generated_code_size_in_bytes,
        "needed": device_bytes(compiled),
        "host": analysis.host_temp_size_in_bytes,
    }


def _rings(mesh: jax.sharding.Mesh) -> dict[int, float]:
    """Bandwidth of the groups that lie along one mesh axis or all of them, by their size; the slower where two have one size."""
    everyone = list(mesh.devices.flat)
    rings: dict[int, float] = {}
    for axis in range(mesh.devices.ndim):
        ring = list(np.moveaxis(mesh.devices, axis, 0).reshape(mesh.devices.shape[axis], -1)[:, 0])
        if len(ring) == 1:
            continue
        found = ring_bandwidth(ring, everyone)
        rings[len(ring)] = min(found, rings.get(len(ring), found))
    return rings | ({mesh.size: ring_bandwidth(everyone, everyone)} if mesh.size not in rings else {})


def _bandwidth(rings: Mapping[int, float], group: int) -> float:
    return rings.get(group, min(rings.values(), default=math.inf))
