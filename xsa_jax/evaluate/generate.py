"""Text from a model: one full forward pass per token over a row of fixed length, so that everything compiles once."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsa_jax.data.store import TokenStore
from xsa_jax.errors import UserError
from xsa_jax.evaluate.restore import Restored
from xsa_jax.model.transformer import Model, Params

Array = jax.Array


def samples(
    restored: Restored, prompt: str, count: int, num_tokens: int | None, temperature: float, top_k: int, seed: int
) -> list[dict[str, Any]]:
    """`count` continuations of one prompt, as {"prompt", "text"}; the text is what follows the prompt.

    Args:
      num_tokens: length of each continuation; None for 200, or fewer where the context has no room for them.

    Raises:
      UserError: as `prompt_ids` and `generate`.
    """
    if count == 0:
        return []
    store, config = restored.store, restored.config
    ids = prompt_ids(store, prompt, config.data.documents)
    num_tokens = num_tokens or max(1, min(200, config.data.seq_len - len(ids)))
    written = generate(
        restored.model, restored.params, [ids] * count, num_tokens,
        context=config.data.seq_len, vocab_size=store.vocab_size, temperature=temperature, top_k=top_k, seed=seed,
    )  # fmt: skip
    tokenizer = store.tokenizer()
    return [{"prompt": prompt, "text": tokenizer.decode(row[len(ids) :])} for row in written]


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    context: int,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[list[int]]:
    """Continues each prompt by `num_tokens` tokens; returns prompt and continuation.

    Args:
      model: the description of the decoder.
      params: its weights, on any devices.
      prompts: token ids, each at least one and of any length.
      num_tokens: at least 1.
      context: the context length that the model was trained at.
      vocab_size: ids from here on are never chosen: a vocabulary padded to a round size has ids that mean nothing.
      temperature: divisor of the logits; 0 takes the most likely token.
      top_k: number of most likely tokens to choose among; 0 = all.
      seed: random seed of the choice.

    Raises:
      UserError: fewer new tokens than 1; an empty prompt; prompt and continuation longer than the context the model was trained at.
    """
    if not 1 <= num_tokens < context:
        raise UserError(
            f"{num_tokens} new tokens: expected at least 1, and fewer than the {context} of the context that the model was "
            f"trained at, since the prompt needs a place too"
        )
    for prompt in prompts:
        if not 1 <= len(prompt) <= context - num_tokens:
            raise UserError(
                f"a prompt of {len(prompt)} tokens with {num_tokens} new ones: expected 1 to {context - num_tokens} in the prompt, "
                f"because the model was trained at a context of {context}"
            )
    tokens_BT = np.zeros((len(prompts), max(map(len, prompts)) + num_tokens), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    run = jax.jit(functools.partial(_continue, model, num_tokens, vocab_size, temperature, top_k))
    written_BT = jax.device_get(run(params, tokens_BT, lengths_B, jax.random.key(seed)))
    return [row[: n + num_tokens].tolist() for row, n in zip(written_BT, lengths_B, strict=True)]


def _continue(
    model: Model,
    num_tokens: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    params: Params,
    tokens_BT: Array,
    lengths_B: Array,
    key: Array,
) -> Array:
    transformer = model.bind(params)
    rows_B = jnp.arange(tokens_BT.shape[0])

    def step(i: Array, tokens_BT: Array) -> Array:
        end_B = lengths_B + i
        hidden_BTD, _ = transformer(tokens_BT, whole_batch=True)  # a causal model does not see the padding after `end`
        logits_BV = transformer.logits(hidden_BTD[rows_B, end_B - 1])[:, :vocab_size]
        chosen_B = _choose(logits_BV, temperature, top_k, jax.random.fold_in(key, i))
        return tokens_BT.at[rows_B, end_B].set(chosen_B)

    return jax.lax.fori_loop(0, num_tokens, step, tokens_BT)


def _choose(logits_BV: Array, temperature: float, top_k: int, key: Array) -> Array:
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if top_k:
        least_B1 = jax.lax.top_k(logits_BV, min(top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV / temperature).astype(jnp.int32)


def prompt_ids(store: TokenStore, text: str, documents: str) -> list[int]:
    """The tokens of `text` as the start of a document, as the model met such starts in training.

    Raises:
      UserError: the text is empty and nothing marks the start of a document.
    """
    # With --eot end the mark belongs to the document before, which a model that keeps documents apart never sees.
    marks = ("start", "both") if documents == "isolate" else ("start", "both", "end")
    start = [store.eot_id] if store.meta["eot"] in marks else []
    ids = start + store.tokenizer().encode_batch([text])[0]
    if not ids:
        raise UserError("the prompt is empty, and this model has seen no token that starts a document: give it some text")
    return ids
