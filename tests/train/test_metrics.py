"""What is counted, when it is read, and what the file looks like after a life that was cut short."""

import json
import math
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import model_of, tiny_config
from xsa_jax import progress
from xsa_jax.config import Config, config_dict, from_config_dict
from xsa_jax.errors import UserError
from xsa_jax.train import metrics as metrics_module
from xsa_jax.train.flops import peak_flops, train_flops_per_token
from xsa_jax.train.metrics import Metrics

pytestmark = pytest.mark.fast


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Value:
    """Stands for a scalar on a device: whoever reads it is noticed."""

    def __init__(self, value: float, on_read: Callable[[float], None]):
        self._value, self._on_read = value, on_read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._on_read(self._value)
        return np.asarray(self._value, dtype)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics_module.time, "perf_counter", clock)
    return clock


def flops_of(config: Config) -> float:
    return train_flops_per_token(config).model


def metrics_of(workdir: pathlib.Path, config: Config, start: int, devices: list[Any], line_seconds: float = 0.0) -> Metrics:
    """What the loop makes for these devices, but with a line for every record."""
    peak = peak_flops(devices[0].device_kind, config.model.dtype)
    return Metrics(
        workdir,
        config.train,
        start,
        flops_per_token=train_flops_per_token(config),
        peak=peak and peak * len(devices),
        line_seconds=line_seconds,
    )


def values(step: int, tokens: float = 100.0, loss: float | None = None) -> dict[str, Any]:
    numbers = {"loss": step + 0.5 if loss is None else loss, "z": 1.0, "grad_norm": 2.0, "lr": 1e-3, "tokens": tokens}
    return {name: np.float32(value) for name, value in numbers.items()}


def records(workdir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_flops_by_hand():
    config = tiny_config({"model.num_layers": 3, "attention.num_kv_heads": 2})
    # Per layer and token: q 32x24, k and v 32x12 each, out 24x32, MLP 2 x 32x48; the head 32x60.
    weights = 3 * (768 + 2 * 384 + 768 + 2 * 1536) + 1920
    # On average a query sees 8.5 of its 16 keys, and with a window of 5 it sees (1 + 2 + 3 + 4 + 12 * 5) / 16.
    assert flops_of(config) == 6 * weights + 3 * 12 * 24 * 8.5
    gated = tiny_config({"model.num_layers": 3, "attention.num_kv_heads": 2, "model.mlp": "swiglu", "attention.window": 5})
    assert flops_of(gated) == 6 * (weights + 3 * 1536) + 3 * 12 * 24 * 70 / 16


@pytest.mark.parametrize(
    ("remat", "again"),
    # Products of one layer that the backward pass repeats: the first MLP matrix; q, k, v and out; both products of attention.
    [
        ("none", 0), ("dots", 0), ("auto", 0), ("offload", 1536), ("attention", 1536 + 768 + 2 * 384 + 768),
        ("full", 1536 + 768 + 2 * 384 + 768 + 2 * 24 * 8.5),
    ],
)  # fmt: skip
def test_hardware_flops_by_hand(remat, again):
    config = tiny_config({"model.num_layers": 3, "model.remat": remat, "train.loss_chunk_tokens": 128})
    scores = 24 * 8.5  # which every backward kernel computes once more
    found = train_flops_per_token(config)
    assert found.hardware - found.model == pytest.approx(2 * 3 * (again + scores))
    chunked_config = tiny_config({"model.num_layers": 3, "model.remat": remat, "train.loss_chunk_tokens": 127})
    chunked = train_flops_per_token(chunked_config)
    assert chunked.hardware - found.hardware == pytest.approx(2 * 1920)  # the logits of each chunk
    assert train_flops_per_token(chunked_config, 2) == found  # each of two devices has its logits at once


def test_flops_are_six_per_parameter_at_the_paper_shape_and_the_same_for_xsa():
    tree = config_dict().to_dict()
    tree["model"] |= {"num_layers": 24, "d_model": 1536, "d_ff": 6144}
    tree["attention"] |= {"num_heads": 24, "num_kv_heads": 24, "head_dim": 64}
    tree["data"]["seq_len"] = 2048
    config = from_config_dict(tree)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model_of(config).abstract_params))
    assert 0.7e9 < parameters < 0.8e9
    attention = 12 * 24 * 1536 * 2049 / 2
    assert flops_of(config) - attention == pytest.approx(6 * parameters, rel=0.001)
    tree["attention"]["kind"] = "xsa"
    assert flops_of(from_config_dict(tree)) == flops_of(config)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12), ("cpu", None), ("NVIDIA GeForce RTX 3090", None), ("TPU v9", None),
    ],
)  # fmt: skip
def test_peak_of_known_devices_and_none_for_others(kind, peak):
    assert peak_flops(kind, "bfloat16") == peak
    assert peak_flops(kind, "float32") is None  # its peak is another


def test_a_step_is_read_only_when_the_next_one_is_on_its_way(tmp_path):
    reads: list[float] = []
    with metrics_of(tmp_path, tiny_config(), 0, jax.devices()[:1]) as metrics:
        for step in (1, 2, 3):
            metrics.add(step, values(step) | {"loss": Value(step, reads.append)})
            assert reads == list(range(1, step))
        metrics.flush()
        metrics.flush()
        assert reads == [1, 2, 3]
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_records_without_a_known_peak(tmp_path, clock):
    with metrics_of(tmp_path, tiny_config(), 0, jax.devices()[:1]) as metrics:
        for step in (1, 2):
            metrics.add(step, values(step))
            clock.now += 0.5
    first, second = records(tmp_path)
    assert first == {"step": 1, "split": "train", "loss": 1.5, "z": 1.0, "grad_norm": 2.0, "lr": pytest.approx(1e-3)}
    assert second["mfu"] is None
    assert second["step_time"] == pytest.approx(0.5)
    assert list((tmp_path / "tensorboard").iterdir())


def test_mfu_of_a_known_device(tmp_path, clock, capsys):
    config = tiny_config({"model.dtype": "bfloat16"})
    device: Any = types.SimpleNamespace(device_kind="NVIDIA H200")
    with metrics_of(tmp_path, config, 0, [device] * 4) as metrics:
        for step in (1, 2, 3):
            metrics.add(step, values(step, tokens=1e9))
            clock.now += 2.0
    last = records(tmp_path)[-1]
    assert last["tokens_per_second"] == pytest.approx(5e8)
    assert last["mfu"] == pytest.approx(5e8 * flops_of(config) / (4 * 989e12))
    assert last["hfu"] == pytest.approx(5e8 * train_flops_per_token(config).hardware / (4 * 989e12))
    assert f"MFU {100 * last['mfu']:.1f}%" in capsys.readouterr().out


def test_rates_cover_every_step_since_the_last_record_and_no_pause(tmp_path, clock):
    """Reading the values of a step is what takes its time: the host waits there for the device."""
    config = tiny_config({"train.log_every": 4})

    def wait(_value: float) -> None:
        clock.now += 0.25

    with metrics_of(tmp_path, config, 0, jax.devices()[:1]) as metrics:
        clock.now += 60.0  # compilation
        for step in range(1, 9):
            metrics.add(step, values(step, tokens=10.0 * step) | {"loss": Value(1.0, wait)})
            if step == 6:
                with metrics.pause(step):
                    clock.now += 1000.0
    by_step = {record["step"]: record for record in records(tmp_path)}
    assert by_step.keys() == {1, 4, 8}
    assert "step_time" not in by_step[1]
    assert by_step[4]["step_time"] == pytest.approx(0.25)
    assert by_step[4]["tokens_per_second"] == pytest.approx((20 + 30 + 40) / 0.75)
    assert by_step[8]["step_time"] == pytest.approx(0.25)
    assert by_step[8]["tokens_per_second"] == pytest.approx((70 + 80) / 0.5)


def test_the_last_step_is_written_whatever_the_interval(tmp_path):
    config = tiny_config({"train.log_every": 7, "train.num_steps": 10})
    with metrics_of(tmp_path, config, 0, jax.devices()[:1]) as metrics:
        for step in range(1, 11):
            metrics.add(step, values(step))
    assert [record["step"] for record in records(tmp_path)] == [1, 7, 10]


def test_a_continued_run_drops_what_came_after_its_checkpoint_and_half_lines(tmp_path):
    config = tiny_config()
    with metrics_of(tmp_path, config, 0, jax.devices()[:1]) as metrics:
        for step in range(1, 6):
            metrics.add(step, values(step))
        metrics.flush()
        metrics.write(3, "validation", {"loss": 3.25})
        metrics.write(5, "validation", {"loss": 5.25})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "split": "tra')  # a kill in mid-write
    with metrics_of(tmp_path, config, 3, jax.devices()[:1]) as metrics:
        metrics.add(4, values(4, loss=40.5))
    kept = [(record["step"], record["split"], record["loss"]) for record in records(tmp_path)]
    assert kept == [(1, "train", 1.5), (2, "train", 2.5), (3, "train", 3.5), (3, "validation", 3.25), (4, "train", 40.5)]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.nan}])
def test_a_number_that_is_not_finite_stops_the_run(tmp_path, bad):
    with metrics_of(tmp_path, tiny_config(), 0, jax.devices()[:1]) as metrics:
        metrics.add(1, values(1))
        metrics.add(2, values(2) | bad)
        with pytest.raises(UserError, match=r"step 2: the train (loss|grad_norm) is (nan|inf).*optim\.peak_lr"):
            metrics.flush()  # as before a save
        with pytest.raises(UserError, match="the validation loss is nan"):
            metrics.write(2, "validation", {"loss": math.nan})
    assert [record["step"] for record in records(tmp_path)] == [1]


def test_the_line_for_people(tmp_path, clock, capsys):
    config = tiny_config({"train.num_steps": 10_000})
    with metrics_of(tmp_path, config, 0, jax.devices()[:1]) as metrics:
        for step in (1, 2):
            metrics.add(step, values(step, tokens=5000.0))
            clock.now += 0.5
        metrics.flush()
        metrics.write(2, "validation", {"loss": 2.25, "bits_per_byte": 1.125})
    first, second, validation = capsys.readouterr().out.splitlines()
    assert first == "step     1/10000  train loss 1.5000  grad 2.00  lr 1.00e-03"
    assert second == (
        "step     2/10000  train loss 2.5000  grad 2.00  lr 1.00e-03  10,000 tokens/s  500 ms/step  MFU unknown  left 1:23:19"
    )
    assert validation == "step     2/10000  validation loss 2.2500  bits/byte 1.1250"


def test_a_pipe_gets_a_line_every_so_often_and_every_line_that_stays(tmp_path, clock, monkeypatch, capsys):
    monkeypatch.setattr(progress.time, "monotonic", clock)
    config = tiny_config({"train.num_steps": 10})
    with metrics_of(tmp_path, config, 0, jax.devices()[:1], line_seconds=15.0) as metrics:
        for step in range(1, 11):
            metrics.add(step, values(step))
            clock.now += 4.0
            if step == 7:
                metrics.write(step, "validation", {"loss": 2.25})
    shown = re.findall(r"^step +(\d+)/10  (\w+) loss", capsys.readouterr().out, re.MULTILINE)
    assert shown == [("1", "train"), ("5", "train"), ("7", "validation"), ("10", "train")]
    assert len(records(tmp_path)) == 11, "the file has them all"


def test_a_terminal_gets_one_updating_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with metrics_of(tmp_path, tiny_config(), 0, jax.devices()[:1]) as metrics:
        for step in range(1, 6):
            metrics.add(step, values(step))
        metrics.flush()
        metrics.write(5, "validation", {"loss": 2.25})
    shown = capsys.readouterr().out
    assert "validation loss 2.2500\n" in shown
    assert shown.count("\n") == 2, "the first step and the validation stay"
    assert "5/20" in shown
