"""A finished checkpoint, brought up for evaluation on whatever devices are here."""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from xsa_jax.config import Config, MeshConfig, UserError, from_config_dict
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import TokenStore
from xsa_jax.mesh import make_mesh
from xsa_jax.model.transformer import Model, Params, build
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.state import abstract_params


@dataclasses.dataclass(frozen=True)
class Restored:
    step: int
    config: Config  # as trained
    model: Model  # its own config has this machine's mesh and attention implementation
    params: Params
    mesh: Mesh
    store: TokenStore

    def held_out(self, context: int, rows: int, max_rows: int) -> Loader:
        """One pass in order over the first `max_rows` rows of `context` held-out tokens, `rows` at a time.

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
            self.store, "validation", seq_len=context, batch_size=rows, documents=self.config.data.documents, max_rows=max_rows
        )


def restore(run: pathlib.Path, step: int | None = None, store: str | None = None) -> Restored:
    """The weights of one step, its config from the checkpoint itself, and the text to measure them on.

    Args:
      run: folder of a training run.
      step: None for the latest.
      store: folder of a token store; None for the one that the run was trained on.

    Raises:
      UserError: no such run, step or store; a damaged checkpoint; a store of another tokenizer.
    """
    with Checkpoints(run) as checkpoints:
        step = checkpoints.latest if step is None else step
        meta = checkpoints.meta(step)
        assert step is not None  # `meta` has refused a run without checkpoints
        config = from_config_dict(meta["config"])
        tokens = _open(store, config.data.path, run)
        _check_tokenizer(tokens, meta["loader"], run)
        here = _for_devices(config, jax.device_count())
        model, mesh = build(here), make_mesh(here)
        params = checkpoints.restore_params(model, abstract_params(model, mesh), step)
        return Restored(step, config, model, params, mesh, tokens)


def _open(given: str | None, trained_on: str, run: pathlib.Path) -> TokenStore:
    if given is None and not pathlib.Path(trained_on).exists():
        raise UserError(
            f"{trained_on}: no such folder; it is the data.path of {run}, seen from the folder that train.py was started in. "
            f"Start there too, or name the token store with --store"
        )
    return TokenStore.open(given or trained_on)


def _for_devices(config: Config, devices: int) -> Config:
    """Weights split over all devices where the width allows; attention by whatever implementation suits them."""
    fsdp = devices if config.model.d_model % devices == 0 else 1
    return dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, impl="auto"),
        data=dataclasses.replace(config.data, batch_size=devices),  # the training batch need not divide over these devices
        mesh=MeshConfig(data=-1, fsdp=fsdp, tensor=1),
    )


def _check_tokenizer(store: TokenStore, trained: dict, run: pathlib.Path) -> None:
    found = store.meta["tokenizer"]["fingerprint"]
    if found != trained["tokenizer"]:
        raise UserError(
            f"{store.path}: made with tokenizer {store.tokenizer_name!r} (fingerprint {found}); {run} was trained on tokens of "
            f"fingerprint {trained['tokenizer']}, so its loss there would mean nothing. Prepare the text with that tokenizer"
        )
