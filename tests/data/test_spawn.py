"""No worker imports jax, or outlives its parent; nothing in xsa_jax.data asks for jax."""

import os
import pkgutil
import signal
import subprocess
import sys
import time

import pytest

import xsa_jax.data
from tests.data.helpers import number_store, words, write_json_lines
from tests.helpers import subprocess_env

# As train.py: a main module that imports jax, and reads through a loader with workers. Each row tells of its process.
TRAINER = """
import itertools, os, signal, sys

import grain
import jax
import numpy as np

from xsa_jax.data.loader import Loader
from xsa_jax.data.store import TokenStore


class Probe:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        jax = any(sys.modules.get(name) for name in ("jax", "jaxlib", "flax", "orbax"))
        main = hasattr(sys.modules["__main__"], "Probe")
        return {"tokens": np.array([jax, main, os.getpid()])}


if __name__ == "__main__":
    loader = Loader(TokenStore.open(sys.argv[1]), "train", seq_len=4, batch_size=1, workers=3)
    loader._batches = grain.MapDataset.source(Probe()).batch(1)
    batches = loader.iterate()
    for batch in itertools.islice(batches, 6):
        print(*batch["tokens"][0], flush=True)
    if "wait" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        print("waiting", flush=True)
        sys.stdin.read()
        for batch in itertools.islice(batches, 30):
            print(*batch["tokens"][0], flush=True)
    batches.close()
"""


@pytest.fixture
def trainer(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    store = number_store(tmp_path / "store", [[50]])
    return [sys.executable, str(tmp_path / "trainer.py"), str(store.path)]


def test_loader_workers_cannot_have_jax(trainer):
    output = subprocess.run(trainer, env=subprocess_env(), check=True, capture_output=True, text=True)
    lines = [tuple(map(int, line.split())) for line in output.stdout.splitlines()]
    assert [line[0] for line in lines] == [0] * 6, "a worker has imported jax"
    assert [line[1] for line in lines] == [0] * 6, "a worker has imported the trainer's main module"
    assert len({line[2] for line in lines}) == 3
    assert output.stderr == ""


def test_loader_workers_end_with_a_killed_trainer(trainer):
    process = subprocess.Popen([*trainer, "wait"], env=subprocess_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    workers = {int(process.stdout.readline().split()[2]) for _ in range(6)}
    assert len(workers) == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_gone(workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_loader_workers_go_on_when_the_whole_group_is_told_to_stop(trainer, number):
    process = subprocess.Popen(
        [*trainer, "wait"],
        env=subprocess_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = {int(process.stdout.readline().split()[2]) for _ in range(6)}
    assert process.stdout.readline() == "waiting\n"
    os.killpg(process.pid, number)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    rows = [int(line.split()[2]) for line in output.splitlines()]
    assert len(rows) == 30, "more than could wait in the workers' queues"
    assert set(rows) == workers
    assert_gone(workers)


def assert_gone(workers):
    deadline = time.monotonic() + 30
    while any(exists(worker) for worker in workers):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.05)


def exists(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


def test_preparation_imports_no_jax_here_or_in_workers(tmp_path):
    for index in range(2):
        write_json_lines(tmp_path / f"{index}.jsonl", words(3, seed=index))
    run = [sys.executable, "-X", "importtime", "-m", "xsa_jax.data.prepare", "--tokenizer", "bytes", "--workers", "2"]
    more = ["--input", str(tmp_path / "*.jsonl"), "--output", str(tmp_path / "store")]
    output = subprocess.run([*run, *more], env=subprocess_env(), check=True, capture_output=True, text=True)
    imported = [line.rsplit("|", 1)[1].strip() for line in output.stderr.splitlines() if line.startswith("import time:")]
    assert imported.count("xsa_jax.data.convert") == 3, "expected this process and two workers"
    assert not {name.split(".")[0] for name in imported} & {"jax", "jaxlib", "flax", "orbax", "grain"}


def test_a_parent_with_jax_prepares_without_it_in_workers(tmp_path):
    write_json_lines(tmp_path / "0.jsonl", words(3))
    write_json_lines(tmp_path / "1.jsonl", words(3, seed=1))
    script = tmp_path / "script.py"
    script.write_text(
        "import os, jax\n"
        "open(os.path.join(os.path.dirname(__file__), f'main-{os.getpid()}'), 'w').close()\n"
        "from xsa_jax.data.prepare import prepare\n"
        "from tests.data.helpers import settings\n"
        "if __name__ == '__main__':\n"
        f"    prepare([{str(tmp_path / '*.jsonl')!r}], {str(tmp_path / 'store')!r}, settings(), workers=2)\n"
    )
    subprocess.run([sys.executable, str(script)], env=subprocess_env(), check=True, capture_output=True)
    assert len(list(tmp_path.glob("main-*"))) == 1, "a worker has run the script's imports"


@pytest.mark.fast
def test_importing_asks_for_no_jax():
    modules = {module.name for module in pkgutil.iter_modules(xsa_jax.data.__path__)} - {
        "loader"
    }  # Grain takes jax where it finds it
    check = (
        "import importlib, sys\n"
        f"for name in {sorted(modules)}: importlib.import_module(f'xsa_jax.data.{{name}}')\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'flax', 'orbax', 'grain'}))"
    )
    output = subprocess.run([sys.executable, "-c", check], env=subprocess_env(), check=True, capture_output=True, text=True)
    assert output.stdout.strip() == "[]"


def test_the_loader_works_where_jax_is_missing(tmp_path):
    store = number_store(tmp_path / "store", [[50]])
    check = (
        "import sys; sys.modules['jax'] = None\n"
        "from xsa_jax.data.loader import Loader\n"
        "from xsa_jax.data.store import TokenStore\n"
        "print(next(Loader(TokenStore.open(sys.argv[1]), 'train', seq_len=4, batch_size=2).iterate())['tokens'].shape)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", check, str(store.path)], env=subprocess_env(), check=True, capture_output=True, text=True
    )
    assert output.stdout.strip() == "(2, 5)"
