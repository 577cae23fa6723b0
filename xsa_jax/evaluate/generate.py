"""Text generation by one full forward pass per token. Rows have a fixed length, so the program compiles once."""

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
    """Samples continuations of one prompt.

    Args:
      restored: the model, with the token store whose tokenizer applies.
      prompt: text to continue.
      count: number of continuations.
      num_tokens: number of tokens per continuation; None for 200, or fewer if the context has no room for them.
      temperature: divisor of the logits; 0 takes the most likely token.
      top_k: number of most likely tokens to sample among; 0 = all.
      seed: random seed for sampling.

    Returns:
      {"prompt", "text"} of each continuation; "text" follows the prompt and does not repeat it.

    Raises:
      UserError: as `prompt_ids` and `generate`, or the tokenizer of the store cannot be loaded.
    """
    if count == 0:
        return []
    store, config = restored.store, restored.config
    ids = prompt_ids(store, prompt, config.data.documents)
    num_tokens = num_tokens or max(1, min(200, config.data.seq_len - len(ids)))
    generated = generate(
        restored.model, restored.params, [ids] * count, num_tokens,
        context=config.data.seq_len, vocab_size=store.vocab_size, temperature=temperature, top_k=top_k, seed=seed,
    )  # fmt: skip
    tokenizer = store.tokenizer()
    return [{"prompt": prompt, "text": tokenizer.decode(row[len(ids) :])} for row in generated]


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
    """Continues each prompt by `num_tokens` tokens.

    Args:
      model: description of the decoder.
      params: weights of the decoder, on any devices.
      prompts: token ids of each prompt, at least one; the lengths may differ.
      num_tokens: number of new tokens per prompt, at least 1.
      context: context length that the model was trained with.
      vocab_size: number of token ids to sample from. The ids above it, which pad the model's vocabulary, are never sampled.
      temperature: divisor of the logits; 0 takes the most likely token.
      top_k: number of most likely tokens to sample among; 0 = all.
      seed: random seed for sampling.

    Returns:
      Token ids of each prompt and its continuation.

    Raises:
      UserError: `num_tokens` is less than 1, a prompt is empty, or a prompt and its continuation exceed the context.
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
    generated_BT = jax.device_get(run(params, tokens_BT, lengths_B, jax.random.key(seed)))
    return [row[: n + num_tokens].tolist() for row, n in zip(generated_BT, lengths_B, strict=True)]


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
        hidden_BTD, _ = transformer(tokens_BT, whole_batch=True)  # a causal model does not see the padding from `end` on
        logits_BV = transformer.logits(hidden_BTD[rows_B, end_B - 1])[:, :vocab_size]
        chosen_B = _choose(logits_BV, temperature, top_k, jax.random.fold_in(key, i))
        return tokens_BT.at[rows_B, end_B].set(chosen_B)

    return jax.lax.fori_loop(0, num_tokens, step, tokens_BT)


def _choose(logits_BV: Array, temperature: float, top_k: int, key: Array) -> Array:
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if top_k:
        threshold_B1 = jax.lax.top_k(logits_BV, min(top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < threshold_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV / temperature).astype(jnp.int32)


def prompt_ids(store: TokenStore, text: str, documents: str) -> list[int]:
    """Token ids of `text` at the start of a document, with the end-of-text token that preceded such starts in training, if any.

    Raises:
      UserError: the text is empty and no token marks the start of a document, or the tokenizer of the store cannot be loaded.
    """
    # With --eot end the token before a start belongs to the previous document, which is invisible where documents are isolated.
    policies = ("start", "both") if documents == "isolate" else ("start", "both", "end")
    start = [store.eot_id] if store.meta["eot"] in policies else []
    ids = start + store.tokenizer().encode_batch([text])[0]
    if not ids:
        raise UserError("the prompt is empty, and this model has seen no token that starts a document: give it some text")
    return ids
