"""Restores a finished checkpoint for evaluation on the devices of this machine."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from xsa_jax.config import Config
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import TokenStore
from xsa_jax.errors import UserError
from xsa_jax.model.transformer import Model, Params, build
from xsa_jax.parallel.mesh import make_evaluation_mesh, platform
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.state import abstract_params


@dataclasses.dataclass(frozen=True)
class Restored:
    """A trained model on this machine's devices.

    Attributes:
      step: step of the checkpoint.
      config: config that the model was trained with.
      model: description of the decoder, with the attention implementation for these devices.
      params: weights of the decoder, split over the mesh.
      mesh: mesh of all devices.
      store: token store to evaluate on.
    """

    step: int
    config: Config
    model: Model
    params: Params
    mesh: Mesh
    store: TokenStore

    def held_out(self, context: int, batch_size: int, max_rows: int, rows: Sequence[int] | None = None) -> Loader:
        """A loader of a single pass, in order, over the first rows of the validation split.

        Args:
          context: context length of a row, in tokens.
          batch_size: number of rows per batch.
          max_rows: largest number of rows to read.
          rows: indices of the rows of each batch that this process reads; None for all.

        Raises:
          UserError: the validation split is shorter than one row.
        """
        tokens = self.store.split("validation").num_tokens
        if not 1 <= context < tokens:
            raise UserError(
                f"context {context}: the validation split of {self.store.path} has {tokens} tokens; "
                f"expected a context from 1 to {tokens - 1}"
            )
        return Loader(
            self.store, "validation", seq_len=context, batch_size=batch_size, documents=self.config.data.documents,
            max_rows=max_rows, rows=rows,
        )  # fmt: skip


def restore(run: pathlib.Path, step: int | None = None, store: str | None = None) -> Restored:
    """Restores the weights of one step, with the config from its checkpoint, and opens a token store.

    Args:
      run: folder of a training run.
      step: step of the checkpoint; None for the latest.
      store: folder of a token store; None for the store that the run was trained on.

    Raises:
      UserError: the run, step or store does not exist, the checkpoint is damaged, or the store has another tokenizer.
    """
    with Checkpoints(run) as checkpoints:
        step = checkpoints.existing_step(step)
        config, loader_state = checkpoints.config(step), checkpoints.loader_state(step)
        tokens = _open_store(store, config.data.path, run)
        _check_tokenizer(tokens, loader_state, run)
        mesh = make_evaluation_mesh(config.model.d_model, jax.devices())
        model = build(config.model, dataclasses.replace(config.attention, impl="auto"), platform(mesh))
        params = checkpoints.restore_params(model, abstract_params(model, mesh), step)
        return Restored(step, config, model, params, mesh, tokens)


def _open_store(given: str | None, trained_on: str, run: pathlib.Path) -> TokenStore:
    if given is None and not pathlib.Path(trained_on).exists():
        raise UserError(
            f"{trained_on}: no such folder; it is the data.path of {run}, seen from the folder that train.py was started in. "
            f"Start there too, or name the token store with --store"
        )
    return TokenStore.open(given or trained_on)


def _check_tokenizer(store: TokenStore, trained: Mapping[str, Any], run: pathlib.Path) -> None:
    found = store.meta["tokenizer"]["fingerprint"]
    if found != trained["tokenizer"]:
        raise UserError(
            f"{store.path}: made with tokenizer {store.tokenizer_name!r} (fingerprint {found}); {run} was trained on tokens of "
            f"fingerprint {trained['tokenizer']}, so its loss there would mean nothing. Prepare the text with that tokenizer"
        )
