"""Generation against a plain loop, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.evaluate.helpers import restored
from xsa_jax.errors import UserError
from xsa_jax.evaluate.generate import generate, prompt_ids, samples

PROMPTS = [[5], [7, 250], [11, 3, 90, 41, 41, 7, 8]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return restored(tmp_path_factory.mktemp("store") / "text")


def last_logits(model, row):
    transformer = model.model.bind(model.params)
    return transformer.logits(transformer(row[None])[0])[0, -1, :257]


def write(model, prompts=PROMPTS, num_tokens=2, **options):
    return generate(model.model, model.params, prompts, num_tokens, **{"context": 16, "vocab_size": 257, **options})


@pytest.mark.fast
def test_greedy_equals_a_plain_loop_over_full_forwards(model):
    forward = jax.jit(lambda row: last_logits(model, row))
    expected = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(2):
            row.append(int(np.argmax(forward(jnp.array(row)))))
        expected.append(row)
    assert write(model, temperature=0.0) == expected
    assert write(model, PROMPTS[:1], temperature=0.0) == expected[:1]
    assert write(model, top_k=1, seed=3) == expected


def test_the_seed_decides_and_top_k_bounds(model):
    one, again, other = (write(model, [[5]] * 64, num_tokens=1, top_k=3, temperature=5.0, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    likeliest = np.argsort(np.asarray(last_logits(model, jnp.array([5]))))[-3:]
    assert {row[1] for row in one} == set(likeliest.tolist())


def test_ids_beyond_the_tokenizer_are_never_chosen(model):
    rows = write(model, [[1]] * 16, num_tokens=10, vocab_size=3, temperature=100.0)
    assert {token for row in rows for token in row} == {0, 1, 2}


@pytest.mark.parametrize(("prompt", "num_tokens", "found"), [([1] * 13, 4, "13 tokens with 4"), ([], 4, "0 tokens")])
def test_a_prompt_must_fit_the_trained_context(model, prompt, num_tokens, found):
    with pytest.raises(UserError, match=f"a prompt of .*{found}.* trained at a context of 16"):
        write(model, [prompt], num_tokens)


@pytest.mark.parametrize("num_tokens", [0, 16, 300])
def test_new_tokens_must_leave_room_for_a_prompt(model, num_tokens):
    with pytest.raises(UserError, match=f"^{num_tokens} new tokens: expected at least 1, and fewer than the 16 of the context"):
        write(model, [[1]], num_tokens)


def test_a_prompt_starts_as_documents_did_in_training(tmp_path):
    stores = {eot: restored(tmp_path / eot, eot=eot).store for eot in ("end", "start", "both", "none")}
    starts = {eot: [prompt_ids(store, "a", how)[:-1] for how in ("ignore", "isolate")] for eot, store in stores.items()}
    assert starts == {"end": [[256], []], "start": [[256], [256]], "both": [[256], [256]], "none": [[], []]}
    with pytest.raises(UserError, match="prompt is empty"):
        prompt_ids(stores["none"], "", "ignore")


def test_samples_are_what_follows_the_prompt(model):
    found = samples(model, "ab", 2, None, 1.0, 0, 0)
    written = write(model, [[256, 97, 98]] * 2, num_tokens=13)
    decode = model.store.tokenizer().decode
    assert found == [{"prompt": "ab", "text": decode(row[3:])} for row in written]
    assert samples(model, "ab", 0, None, 1.0, 0, 0) == []
