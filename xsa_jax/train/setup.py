"""The assembly of a run, for all code that runs, measures or compiles one.

`assemble` needs only a config and a list of devices. It opens no file and allocates no array, so the devices may belong to a
topology description, without hardware. Only `open_data` imports Grain.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from xsa_jax.config import Config
from xsa_jax.errors import ConfigError
from xsa_jax.model.attention import check_implementation
from xsa_jax.model.transformer import Model, build
from xsa_jax.parallel import hlo
from xsa_jax.parallel.chips import chip
from xsa_jax.parallel.compiler import Option, compiler_options
from xsa_jax.parallel.mesh import batch_rows, batch_sharding, batch_shards, make_mesh, platform
from xsa_jax.train import optim
from xsa_jax.train.flops import Flops, train_flops_per_token
from xsa_jax.train.state import TrainState, abstract_state, init_state
from xsa_jax.train.step import Step, make_step
from xsa_jax.train.validate import Evaluator, make_evaluator

if TYPE_CHECKING:
    from xsa_jax.data.loader import Loader


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that is ready to start.

    Attributes:
      config: config of the run.
      mesh: mesh of the devices.
      model: description of the decoder, with the policy that `model.remat=auto` chose.
      tx: optimiser.
      abstract_state: shapes, types and shardings of the train state.
      step: jitted train step; it donates the buffers of its state argument.
      evaluator: jitted validation of one batch.
    """

    config: Config
    mesh: Mesh
    model: Model
    tx: optax.GradientTransformation
    abstract_state: TrainState
    step: Step
    evaluator: Evaluator

    @property
    def flops_per_token(self) -> Flops:
        """FLOPs of a train step per token."""
        return train_flops_per_token(dataclasses.replace(self.config, model=self.model.config), batch_shards(self.mesh))

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    def init_state(self) -> TrainState:
        """The train state at step 0. Each leaf is created with its sharding."""
        return init_state(self.model, self.tx, self.mesh, self.config.seed)

    def abstract_batch(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes, types and shardings of a training batch: int32 [B, T+1] tokens and, where documents are isolated, segment ids."""
        data = self.config.data
        ids = jax.ShapeDtypeStruct((data.batch_size, data.seq_len + 1), jnp.int32, sharding=batch_sharding(self.mesh))
        return {"tokens": ids, "segment_ids": ids} if data.documents == "isolate" else {"tokens": ids}

    @property
    def compiler_options(self) -> dict[str, Option]:
        """The options that the train step is compiled with."""
        return compiler_options(self.mesh.devices.flat[0].device_kind, self.config.train.deterministic)

    def compile(self) -> jax.stages.Compiled:
        """The train step compiled for the devices of the mesh, which may lack hardware."""
        options: Any = self.compiler_options
        return self.lower().compile(options)

    def lower(self) -> jax.stages.Lowered:
        """The train step lowered for the devices of the mesh, which may lack hardware."""
        step: Any = self.step
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            traced = step.trace(self.abstract_state, self.abstract_batch())
            found = platform(self.mesh)
            return traced.lower(lowering_platforms=("cuda" if found == "gpu" else found,))


def assemble(config: Config, devices: Sequence[jax.Device] | None = None) -> Setup:
    """Assembles the run of a config. With `model.remat=auto` it compiles the step, up to three times, to see what fits.

    Args:
      config: config of the run.
      devices: devices of the run; None for all devices of jax.

    Raises:
      ConfigError: the mesh does not fit the devices, or the attention implementation does not support the config on them.
    """
    if config.model.remat == "auto":
        return dataclasses.replace(_with_cheapest_remat(config, devices), config=config)
    mesh = make_mesh(config.mesh, config.data.batch_size, config.model.d_model, jax.devices() if devices is None else devices)
    isolate = config.data.documents == "isolate"
    check_implementation(config.model, config.attention, segments=isolate, seq_len=config.data.seq_len, platform=platform(mesh))
    model = build(config.model, config.attention, platform(mesh))
    lr = optim.schedule(config.optim, config.train.num_steps)
    tx = optim.optimizer(config.optim, config.train.num_steps, model.axes)
    abstract = abstract_state(model, tx, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(make_step(model, tx, lr, config.train), donate_argnums=0, out_shardings=(shardings, None))
    return Setup(config, mesh, model, tx, abstract, step, make_evaluator(model, config.train.loss_chunk_tokens))


# Share of a device's memory that a step may need: the runtime and the next batch take some.
_USABLE = 0.95


def _with_cheapest_remat(config: Config, devices: Sequence[jax.Device] | None) -> Setup:
    """The run with the policy of `model.remat` that `auto` stands for.

    Of `dots` and `attention` it is the one that takes fewer cycles by the compiler's estimate, among those that fit the memory of a
    device. Compilers for GPUs estimate none; there `dots` goes first. `full` is for where neither fits. Nothing is recomputed on a
    CPU, where memory has no limit. `none` gains nothing elsewhere: to store and read what `dots` recomputes takes a TPU as long
    (docs/pods.md).
    """

    def setup_with(policy: Any) -> Setup:
        return assemble(dataclasses.replace(config, model=dataclasses.replace(config.model, remat=policy)), devices)

    def cycles_if_it_fits(setup: Setup, memory: float) -> int | None:
        try:
            compiled = setup.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        if device_bytes(compiled) > _USABLE * memory:
            return None
        return _cycles(compiled) if platform(setup.mesh) == "tpu" else 0

    unlimited = setup_with("none")
    memory = _device_memory(unlimited.mesh)
    if memory is None:
        return unlimited
    best: tuple[int, Setup] | None = None
    for setup in map(setup_with, ("dots", "attention", "full")):
        if best and (setup.model.config.remat == "full" or best[0] == 0):
            break
        cycles = cycles_if_it_fits(setup, memory)
        if cycles is not None and (best is None or cycles < best[0]):
            best = cycles, setup
    if best is None:
        kind = unlimited.mesh.devices.flat[0].device_kind
        raise ConfigError(
            f"model.remat='auto': no policy fits the {memory / 2**30:.1f} GiB of a {kind}; raise mesh.fsdp, or lower "
            f"data.batch_size or train.loss_chunk_tokens"
        )
    return best[1]


def _cycles(compiled: jax.stages.Compiled) -> int:
    return hlo.read(compiled.as_text() or "").cycles


def _device_memory(mesh: Mesh) -> float | None:
    """Bytes that programs may use on a device of this process, or on a described one; None for CPUs and where it is unknown."""
    if platform(mesh) == "cpu":
        return None
    device = next((device for device in mesh.devices.flat if device.process_index == jax.process_index()), mesh.devices.flat[0])
    stated = chip(device.device_kind)
    try:
        return (device.memory_stats() or {})["bytes_limit"]  # less than the maker states: jax leaves some to others
    except (jax.errors.JaxRuntimeError, NotImplementedError, AttributeError, KeyError):  # the device is not here
        return stated.memory if stated else None


def device_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of device memory that a compiled program needs, with its arguments and results."""
    memory: Any = compiled.memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return arrays + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


class Data(NamedTuple):
    """The text of a run.

    Attributes:
      training: shuffled rows without end.
      held_out: one pass in order over the first `eval.tokens` tokens of the validation split.
      bytes_per_token: mean number of UTF-8 bytes per token in the validation split.
    """

    training: "Loader"
    held_out: "Loader"
    bytes_per_token: float


def open_data(config: Config, mesh: Mesh) -> Data:
    """Opens the run's token store, to read the rows that the devices of this process hold.

    Raises:
      UserError: the store is missing, damaged or too small.
      ConfigError: the vocabulary of the store is larger than that of the model.
    """
    from xsa_jax.data.loader import Loader  # imported here because benchmarks run on machines without grain
    from xsa_jax.data.store import TokenStore

    data = config.data
    store = TokenStore.open(data.path)
    if store.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: expected at least the {store.vocab_size} of {data.path} "
            f"(tokenizer {store.tokenizer_name})"
        )
    rows = batch_rows(mesh, data.batch_size)
    training = Loader(
        store, "train", seq_len=data.seq_len, batch_size=data.batch_size, seed=data.seed, documents=data.documents,
        workers=data.workers, rows=rows,
    )  # fmt: skip
    held_out = Loader(
        store, "validation", seq_len=data.seq_len, batch_size=data.batch_size, documents=data.documents,
        max_rows=max(1, config.eval.tokens // data.seq_len), rows=rows,
    )  # fmt: skip
    return Data(training, held_out, store.split("validation").bytes_per_token)
