"""Checkpoints of a run, stored by Orbax. Saves are asynchronous and atomic, and a restore first checks every leaf.

A checkpoint holds two items: `params`, and `opt_state` with the step counter and the random state. The config and the state of the
loader are stored with them as JSON. Evaluation reads only `params`, on any number of devices.
"""

import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from xsa_jax.config import CheckpointConfig, Config
from xsa_jax.config.rules import check_continues, check_same_weights
from xsa_jax.config.stored import from_stored, to_stored
from xsa_jax.errors import UserError
from xsa_jax.model.transformer import Model, Params
from xsa_jax.train.state import TrainState


class _BackgroundErrors(logging.Filter):
    """Hands on the errors that threads of Orbax log.

    Orbax raises the error of a save at the next one. With several processes it does not even then, because each waits for the
    others to finish. But it logs the error at once.
    """

    def __init__(self, on_error: Callable[[BaseException], None]):
        super().__init__()
        self._on_error = on_error

    def filter(self, record: logging.LogRecord) -> bool:
        """True, since every record is printed where this process goes on."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.levelno >= logging.ERROR and "orbax" in pathlib.Path(record.pathname).parts:
            self._on_error(error)
        return True


class Checkpoints:
    """The checkpoints under `workdir/checkpoints`. As a context manager it waits, when it closes, for an unfinished save.

    Args:
      workdir: folder of the run.
      config: the `checkpoint` group of the run's config. None opens for reading: nothing is created, deleted or cleaned up.
      on_error: function that gets the UserError of a failed save from the thread that writes; `save` raises it too, the next time.

    Raises:
      UserError: the folder is missing and would be opened for reading, or a file has its name.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: CheckpointConfig | None = None,
        on_error: Callable[[UserError], None] = lambda error: None,
    ):
        self.directory = workdir.absolute() / "checkpoints"
        if config is None and not self.directory.is_dir():
            raise UserError(
                f"{workdir}: expected a run with a folder 'checkpoints', found none; name the --workdir of a training run"
            )
        if self.directory.exists() and not self.directory.is_dir():
            raise UserError(f"{self.directory}: expected a folder, found a file; move it away")
        keep: Any = ocp.training.preservation_policies
        policies = [] if config is None else [keep.LatestN(config.keep_last)]
        if config is not None and config.keep_every:
            policies.append(keep.EveryNSteps(config.keep_every))
        self._orbax = ocp.training.Checkpointer(
            self.directory,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=keep.AnyPreservationPolicy(policies) if policies else keep.PreserveAll(),
            cleanup_tmp_directories=config is not None,  # unfinished files of a killed save
        )
        self._errors = _BackgroundErrors(lambda error: on_error(self._unwritten(error)))
        if config is not None:
            logging.getLogger("absl").addFilter(self._errors)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_rest: object) -> None:
        try:
            with self._writable() if kind is None else contextlib.suppress(Exception):
                self._orbax.close()
        finally:
            logging.getLogger("absl").removeFilter(self._errors)

    @property
    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    @property
    def latest(self) -> int | None:
        """Step of the latest committed checkpoint; None if there is none."""
        return self.steps[-1] if self.steps else None

    def existing_step(self, step: int | None) -> int:
        """The step itself, or the latest one for None.

        Raises:
          UserError: there is no finished checkpoint of that step, or none at all.
        """
        if not self.steps:
            raise UserError(f"{self.directory}: no finished checkpoint; train until the first save (checkpoint.every) first")
        if step is None:
            return self.steps[-1]
        if step not in self.steps:
            raise UserError(f"{self.directory}: no finished checkpoint of step {step}; there are {', '.join(map(str, self.steps))}")
        return step

    def save(self, step: int, state: TrainState, config: Config, loader_state: dict[str, Any]) -> None:
        """Starts to save a checkpoint, and returns once its values are copied off the device.

        Args:
          step: number of updates that led to `state`.
          state: train state to save.
          config: config of the run.
          loader_state: state of the training loader after `step` batches.

        Raises:
          UserError: this save, or the previous one in the background, could not be written.
        """
        items = {
            "params": state.params,
            "opt_state": {"step": state.step, "rng": state.rng, "optimizer": state.opt_state},
        }
        meta = {"config": to_stored(config), "loader": loader_state}
        with self._writable():
            self._orbax.save_checkpointables_async(step, items, custom_metadata=meta)

    def config(self, step: int | None = None) -> Config:
        """The config in a checkpoint, which this version or an older one saved.

        Args:
          step: step of the checkpoint; None for the latest.

        Raises:
          UserError: the checkpoint does not exist, is damaged, or holds a field that this version does not know.
        """
        step = self.existing_step(step)
        return from_stored(self._meta(step, "config"), str(self.directory / str(step)))

    def loader_state(self, step: int | None = None) -> dict[str, Any]:
        """The state of the loader in a checkpoint.

        Args:
          step: step of the checkpoint; None for the latest.

        Raises:
          UserError: the checkpoint does not exist or is damaged.
        """
        return self._meta(self.existing_step(step), "loader")

    def _meta(self, step: int, name: str) -> dict[str, Any]:
        with self._readable(step):
            return self._orbax.checkpointables_metadata(step).custom_metadata[name]

    def restore(self, config: Config, abstract: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """Restores the train state and the state of the loader, to continue a run.

        Args:
          config: config of the continuation.
          abstract: shapes, types and shardings of the train state.
          step: step of the checkpoint; None for the latest.

        Raises:
          UserError: the checkpoint does not exist or is damaged, or a leaf is missing, extra, or of another shape or type. The
            message names the path of the leaf.
          ConfigError: the run was started with another config. The message names the fields that differ.
        """
        step = self.existing_step(step)
        loader_state = self.loader_state(step)
        check_continues(self.config(step), config, str(self.directory.parent))
        opt_state = {"step": abstract.step, "rng": abstract.rng, "optimizer": abstract.opt_state}
        items = self._load(step, {"params": abstract.params, "opt_state": opt_state})
        opt_items = items["opt_state"]
        return TrainState(opt_items["step"], items["params"], opt_items["optimizer"], opt_items["rng"]), loader_state

    def restore_params(self, model: Model, abstract_params: Params, step: int | None = None) -> Params:
        """Restores only the weights.

        Args:
          model: description of the model that is to use the weights.
          abstract_params: shapes, types and shardings of the weights.
          step: step of the checkpoint; None for the latest.

        Raises:
          UserError: as `restore`.
          ConfigError: the checkpoint holds the weights of another model. The message names the fields that differ.
        """
        step = self.existing_step(step)
        check_same_weights(self.config(step), model.config, model.attention, str(self.directory.parent))
        return self._load(step, {"params": abstract_params})["params"]

    def _load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        with self._readable(step):
            stored = self._orbax.checkpointables_metadata(step).metadata
            for item in abstract:
                if item in stored and stored[item] is None:  # Orbax only logs that it cannot read the description of an item
                    raise ValueError(f"the description of {item!r} is damaged")
            _check_leaves(abstract, stored, str(self.directory / str(step)))
            return self._orbax.load_checkpointables(step, abstract)

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Orbax raises many types of error, including those of its storage library.
            raise UserError(
                f"{self.directory / str(step)}: this checkpoint cannot be read ({_reason(error)}). It may be damaged: "
                f"restore the folder, or move it away to go on from an earlier step"
            ) from error

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: BaseException) -> UserError:
        return UserError(
            f"{self.directory}: a checkpoint could not be written ({_reason(error)}). Those before it are whole: make room, "
            f"or see to the folder's rights, and run the same command again"
        )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _check_leaves(abstract: dict[str, Any], stored: dict[str, Any], where: str) -> None:
    """Compares every leaf, because Orbax converts types silently and names no path where trees differ."""
    for item, tree in abstract.items():
        if item not in stored:
            raise UserError(f"{where}: no item {item!r}; found {', '.join(sorted(stored))}")
        expected, found = _leaves(tree), _leaves(stored[item])
        for path in sorted(expected.keys() | found.keys()):
            if path not in found:
                raise UserError(f"{where}: {item}/{path} is missing; this model needs it with shape {expected[path][0]}")
            if path not in expected:
                raise UserError(f"{where}: {item}/{path} of shape {found[path][0]} is in the checkpoint but not in this model")
            if expected[path] != found[path]:
                raise UserError(f"{where}: {item}/{path} is {found[path]} in the checkpoint, expected {expected[path]}")


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
