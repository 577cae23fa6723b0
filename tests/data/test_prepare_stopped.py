"""Preparations that were killed, interrupted or ran out of disk: they end in one line, and continue to the same bytes."""

import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests.data.helpers import files_of, settings, words, write_json_lines
from tests.helpers import subprocess_env
from xsa_jax.data.prepare import prepare
from xsa_jax.data.store import TokenStore
from xsa_jax.errors import UserError


def command(pattern, output, *more):
    return [
        sys.executable,
        "-m",
        "xsa_jax.data.prepare",
        "--input",
        str(pattern),
        "--tokenizer",
        "bytes",
        "--output",
        str(output),
        *more,
    ]


def test_killed_at_any_moment_it_continues_to_the_same_bytes(tmp_path):
    for index in range(10):
        write_json_lines(tmp_path / f"{index}.jsonl", words(40, seed=index) * 150)
    run = command(tmp_path / "*.jsonl", tmp_path / "killed", "--workers", "2", "--validation-fraction", "0.1")
    process = subprocess.Popen(run, env=subprocess_env())
    while not (tmp_path / "killed" / "work" / "00000.json").exists():
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.002)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "meta.json").exists()
    with pytest.raises(UserError, match="did not finish"):
        TokenStore.open(tmp_path / "killed")
    done = (tmp_path / "killed" / "train" / "00000.tokens.npy").stat().st_mtime_ns
    assert workers
    wait_until(lambda: not any(alive(worker) for worker in workers), "workers outlived their parent")

    subprocess.run(run, env=subprocess_env(), check=True, capture_output=True)
    assert (tmp_path / "killed" / "train" / "00000.tokens.npy").stat().st_mtime_ns == done
    prepare([str(tmp_path / "*.jsonl")], tmp_path / "straight", settings(validation_fraction=0.1))
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "straight")


def children(pid):
    tasks = f"/proc/{pid}/task/{pid}/children"
    if not os.path.exists(tasks):
        pytest.skip("needs Linux's list of child processes")
    with open(tasks) as file:
        return [int(child) for child in file.read().split()]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, message):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def test_ctrl_c_stops_the_workers_and_says_how_to_continue(tmp_path):
    for index in range(2):
        write_json_lines(tmp_path / f"{index}.jsonl", [text * 50 for text in words(20, seed=index)] * 100)
    run = command(tmp_path / "*.jsonl", tmp_path / "out", "--workers", "2")
    process = subprocess.Popen(run, env=subprocess_env(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until((tmp_path / "out" / "train").exists, "did not start")
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert error.strip() == "prepare: interrupted; run the same command again to continue"
    assert not list((tmp_path / "out" / "train").iterdir()), "a worker went on to the end of its file"


def test_a_killed_worker_ends_the_others(tmp_path):
    write_json_lines(tmp_path / "0.jsonl", [text * 50 for text in words(20)] * 200)
    write_json_lines(tmp_path / "1.jsonl", words(1))
    run = command(tmp_path / "*.jsonl", tmp_path / "out", "--workers", "2")
    process = subprocess.Popen(run, env=subprocess_env(), stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "out" / "work" / "00001.json").exists, "the small file was not finished")
    # Only the idle worker's death leaves the other waiting for a lock that nobody will release.
    idle = [pid for pid in children(process.pid) if is_worker(pid) and not has_open(pid, "0.jsonl")]
    assert len(idle) == 1
    os.kill(idle[0], signal.SIGKILL)
    try:
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 1
    assert error == "prepare: a worker process was killed (out of memory?); run the same command again to continue\n"


def is_worker(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return "spawn_main" in file.read()


def has_open(pid, name):
    descriptors = f"/proc/{pid}/fd"
    return any(os.readlink(os.path.join(descriptors, number)).endswith(name) for number in os.listdir(descriptors))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_one_line_and_can_be_continued(tmp_path, workers):
    for index in range(2):
        write_json_lines(tmp_path / f"{index}.jsonl", words(500, seed=index))
    run = command(tmp_path / "*.jsonl", tmp_path / "store", "--workers", workers)

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    failed = subprocess.run(run, env=subprocess_env(), preexec_fn=small_disk, capture_output=True, text=True)
    assert failed.returncode == 1
    assert re.fullmatch(r"prepare: .*store: .*File too large.*; run the same command again .*\n", failed.stderr)
    assert not list((tmp_path / "store").rglob("*.tmp"))
    subprocess.run(run, env=subprocess_env(), check=True, capture_output=True)
    TokenStore.open(tmp_path / "store").verify()
