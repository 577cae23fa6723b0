"""The scripts of launch/: linted where shellcheck is installed, and run on this host where their launcher can be."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from tests.helpers import REPO, subprocess_env
from tests.processes import STEPS, STOPPED, compiled, free_port, losses, store, train, wait_for  # noqa: F401 fixtures

LAUNCH = REPO / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])

# In the place of ssh: it runs the command here.
SSH = """#!/bin/sh
while true; do
  case "$1" in
    -tt) shift ;;
    -o) shift 2 ;;
    *) break ;;
  esac
done
shift
exec sh -c "$*"
"""


@pytest.mark.fast
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("install shellcheck")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.fast
def test_the_job_set_gives_each_pod_its_index_and_one_coordinator():
    (job,) = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"][-1]
    assert spec["completionMode"] == "Indexed"
    assert f"--num_processes={spec['completions']}" in command
    assert spec["completions"] == spec["parallelism"]
    name, subdomain = "xsa", "xsa"
    assert f"--coordinator={name}-{job['name']}-0-0.{subdomain}:8476" in command
    assert '--process_id="$JOB_COMPLETION_INDEX"' in command


def environment(compiled: pathlib.Path, **more: str) -> dict[str, str]:
    return subprocess_env(1, PYTHON=sys.executable, JAX_COMPILATION_CACHE_DIR=str(compiled), **more)


def test_ssh_starts_all_hosts_and_stops_them_politely(tmp_path, store, compiled):
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = environment(compiled, PATH=path, HOSTS="127.0.0.1 127.0.0.1", PORT=str(free_port()))
    endless = train(tmp_path / "run", store, {"train.num_steps": 5000, "optim.schedule": "constant", "eval.every": 0})[1:]
    with (tmp_path / "output").open("w") as output:
        running = subprocess.Popen([LAUNCH / "ssh.sh", *endless], env=env, stdout=output, stderr=output)
    try:
        wait_for(running, tmp_path / "run" / "metrics.jsonl", '"step": 3,')
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == STOPPED, (tmp_path / "output").read_text()
        assert "saving step" in (tmp_path / "output").read_text()
    finally:
        running.kill()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="install OpenMPI")
def test_mpirun(tmp_path, store, compiled):
    env = environment(
        compiled, PROCESSES="2", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        MPI_FLAGS="--oversubscribe --mca btl self,vader --mca oob_tcp_if_include lo",
    )  # fmt: skip
    done = subprocess.run(
        [LAUNCH / "mpirun.sh", *train(tmp_path / "run", store, {"mesh.fsdp": 2})[1:]],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("validation", STEPS) in losses(tmp_path / "run")
