"""Loss by position and context, against a plain pass over the rows."""

import math

import numpy as np
import pytest

from tests.evaluate.helpers import direct_nll, restored
from xsa_jax.errors import UserError
from xsa_jax.evaluate import loss

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("context", [1, 2, 3, 16, 100, 256, 2048])
def test_buckets_cover_each_position_once(context):
    ranges = loss.buckets(context)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(context))
    assert all(start < stop <= 2 * max(start, 0.5) for start, stop in ranges)


def test_buckets_are_these():
    assert loss.buckets(20) == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 20)]


@pytest.mark.parametrize("documents", ["ignore", "isolate"])
def test_equals_a_plain_pass_with_a_ragged_last_batch_at_every_context(tmp_path, monkeypatch, documents):
    monkeypatch.setattr(loss, "_TOKENS_PER_DEVICE", 80)
    model = restored(tmp_path, {"data.documents": documents})
    tokens = model.store.split("validation").num_tokens
    for context in (16, 10):
        expected = direct_nll(model, context, tokens)
        assert len(expected) % (80 // context), "this text should leave a ragged last batch"
        sums = loss.position_sums(model, context, tokens)
        np.testing.assert_allclose(sums.nll_T, np.nansum(expected, axis=0), rtol=1e-5)
        np.testing.assert_array_equal(sums.tokens_T, np.isfinite(expected).sum(axis=0))
        for bucket in loss.summary(sums, 1.0)["buckets"]:
            of_bucket = expected[:, bucket["start"] : bucket["stop"]]
            assert bucket["loss"] == pytest.approx(np.nanmean(of_bucket), rel=1e-5)


def test_the_report_adds_up(tmp_path):
    model = restored(tmp_path)
    split = model.store.split("validation")
    first, second = loss.losses(model, [16, 8, 16], tokens=100)
    assert (first["context"], first["tokens"]) == (16, 96)
    assert (second["context"], second["tokens"]) == (8, 96)
    assert sum(bucket["tokens"] for bucket in first["buckets"]) == first["tokens"]
    total = sum(bucket["loss"] * bucket["tokens"] for bucket in first["buckets"])
    assert total == pytest.approx(first["loss"] * first["tokens"], rel=1e-12)
    # By hand: so many bits for 96 tokens, each of which stands for so many bytes of text.
    text_bytes = 96 * sum(shard.num_bytes for shard in split.shards) / split.num_tokens
    assert first["bits_per_byte"] == pytest.approx(total / math.log(2) / text_bytes, rel=1e-12)
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))


def test_a_context_that_the_split_cannot_fill_is_refused(tmp_path):
    model = restored(tmp_path)
    tokens = model.store.split("validation").num_tokens
    with pytest.raises(UserError, match=rf"context {tokens}: .* has {tokens} tokens; expected a context from 1 to {tokens - 1}"):
        loss.position_sums(model, tokens, 10**6)
    assert model.held_out(tokens - 1, 1, 1).num_rows == 1
