"""The loop in this process, on eight fake devices: what a run continues, refuses and leaves behind."""

import json
import os
import resource
import shutil
import signal
import subprocess

import numpy as np
import pytest

from tests.data.helpers import text_store, words
from tests.helpers import REPO, mesh_of, tiny_config
from xsa_jax.errors import UserError
from xsa_jax.train import actions, loop, setup, workdir
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.stopping import Stopping

STEPS = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return text_store(tmp_path_factory.mktemp("data") / "store", words(80), validation_fraction=0.2)


def config_for(store, overrides=()):
    return tiny_config({
        "attention.kind": "xsa", "model.vocab_size": 258, "data.path": str(store.path), "train.num_steps": STEPS, "eval.every": 4,
        "checkpoint.every": 2, "checkpoint.keep_every": 2, **dict(overrides),
    })  # fmt: skip


def train(config, folder):
    loop.train(config, folder, (actions.log, actions.validate, actions.save))


def losses(folder, split="train"):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["split"] == split}


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """A run on a mesh of 2 x 2 x 2 that nothing stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(config_for(store, {"mesh.fsdp": 2, "mesh.tensor": 2}), folder)
    return folder


@pytest.fixture
def stopped(whole, tmp_path):
    """That run as it would be had it ended after step 4."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for step in (6, 8):
        shutil.rmtree(folder / "checkpoints" / str(step))
    return folder


def test_another_mesh_continues_the_run(store, whole, stopped, capsys):
    train(config_for(store, {"mesh.tensor": 2}), stopped)
    assert "continuing from step 4" in capsys.readouterr().out
    for split in ("train", "validation"):
        expected, found = losses(whole, split), losses(stopped, split)
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


def test_no_array_is_gathered_whole_on_its_way_between_two_shardings(store, tmp_path, capfd):
    config = config_for(store, {"mesh.fsdp": 2, "mesh.tensor": 2, "optim.warmup_steps": 0, "train.num_steps": 1})
    train(config, tmp_path / "run")
    assert "Involuntary full rematerialization" not in capfd.readouterr().err  # how XLA says it


def test_other_tokens_under_the_same_name_are_refused(stopped, tmp_path):
    other = text_store(tmp_path / "other", words(80, seed=1), validation_fraction=0.2)
    before = sorted(os.walk(stopped))
    with pytest.raises(UserError, match="data stream is another one: store"):
        train(config_for(other), stopped)
    assert sorted(os.walk(stopped)) == before


def test_lost_checkpoints_are_not_a_fresh_start(store, stopped):
    shutil.rmtree(stopped / "checkpoints")
    before = (stopped / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="metrics reach step 8 with a save every 2, but there is no checkpoint"):
        train(config_for(store), stopped)
    assert (stopped / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("left", ["", "{", "[]", '{"checkpoint": {"every": 1000}}'])
def test_a_life_that_ended_before_its_first_save_starts_over(tmp_path, left):
    (tmp_path / "config.json").write_text(left)
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "split": "train"}\n3\nnull\n{}\n{"step": 8, "spl')
    workdir.check_nothing_lost(tmp_path)


def test_numpy_batches_do_not_slip_onto_the_device(store, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "put_batch", lambda mesh, batch: dict(batch))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(config_for(store), tmp_path / "run")


def test_weights_that_are_not_finite_are_never_saved(store, tmp_path, monkeypatch):
    real = setup.make_step

    def poisoned(*args):
        step = real(*args)

        def with_nan(state, batch):
            state, values = step(state, batch)
            return state, values | {"grad_norm": values["grad_norm"] * float("nan")}

        return with_nan

    monkeypatch.setattr(setup, "make_step", poisoned)
    with pytest.raises(UserError, match="step 1: the train grad_norm is nan"):
        train(config_for(store, {"checkpoint.every": 1}), tmp_path / "run")
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == []


def test_a_stop_during_a_validation_saves_without_waiting_for_its_end(store, tmp_path, monkeypatch, capsys):
    real, read = actions.validate_rows, []

    def slow(evaluator, params, batches, rows, mesh):
        def counted():
            for batch in batches:
                read.append(batch)
                os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return real(evaluator, params, counted(), rows, mesh)

    monkeypatch.setattr(actions, "validate_rows", slow)
    train(config_for(store, {"eval.every": 3, "checkpoint.every": 100, "eval.tokens": 1024}), tmp_path / "run")
    assert len(read) == 1
    assert losses(tmp_path / "run", "validation") == {}
    assert "SIGTERM: saving step 3" in capsys.readouterr().out
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == [3]


def test_the_caller_may_add_an_action_with_a_cadence_of_its_own(store, tmp_path):
    seen = []

    def count(run):
        return actions.Action(lambda moment: seen.append((moment.step, moment.last, int(moment.state.step))), every=3)

    loop.train(config_for(store), tmp_path / "run", (actions.log, count))
    assert seen == [(3, False, 3), (6, False, 6), (8, True, 8)]
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == [], "nobody asked for saves"


def test_an_action_that_is_due_runs_once_when_the_run_stops_there(store, tmp_path):
    """The signal comes inside the action itself, after which the run stops: it must not run again, and others must."""
    ran = []

    def action(name, every, on_stop):
        def run(moment):
            ran.append((name, moment.step))
            if ran == [("due", 3)]:  # once: a second signal would end this process
                os.kill(os.getpid(), signal.SIGTERM)

        return lambda _: actions.Action(run, every, on_stop)

    chosen = (action("due", 3, True), action("later", 5, True), action("never", 0, False))
    loop.train(config_for(store), tmp_path / "run", chosen)
    assert ran == [("due", 3), ("later", 3)]


def test_a_full_disk_is_one_clear_error(store, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, limits[1]))  # room for the metrics, not for a checkpoint
    try:
        with pytest.raises(UserError, match=r"checkpoints: a checkpoint could not be written .*run the same command again"):
            train(config_for(store), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_where_the_checkpoints_should_be(store, tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints: expected a folder, found a file"):
        train(config_for(store), tmp_path)


def test_a_run_knows_its_code():
    head = subprocess.run(["git", "-C", REPO, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        assert workdir.git_state() == "unknown"
    else:
        assert workdir.git_state().removesuffix("+changes") == head.stdout.strip()


def test_the_second_signal_is_not_ours():
    before = signal.getsignal(signal.SIGINT)
    with Stopping(mesh_of(tiny_config(), 8)) as stopping:
        assert stopping.poll() is None
        assert signal.getsignal(signal.SIGINT) is not before
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.reason is None, "only a poll decides"
        assert stopping.poll() == stopping.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_the_caller_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Stopping(mesh_of(tiny_config(), 8)) as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopping.poll() is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stopping.poll() == "SIGUSR1"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_stops_when_its_hours_have_passed(store, tmp_path):
    reason = loop.train(config_for(store), tmp_path / "run", (actions.log, actions.save), max_hours=0.0)
    assert reason == "--max_hours=0 have passed"
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == [1]
    assert loop.train(config_for(store), tmp_path / "run", (actions.log, actions.save)) is None
