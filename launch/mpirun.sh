#!/usr/bin/env bash
# A training run under OpenMPI 4, one process per slot: PROCESSES=16 launch/mpirun.sh --config ... --workdir ...
# More options of mpirun, such as a host file, go into MPI_FLAGS. See docs/launch.md.
set -euo pipefail
cd "$(dirname "$0")/.."

read -r -a flags <<<"${MPI_FLAGS:-}"
exec mpirun -n "${PROCESSES:?set PROCESSES to the number of processes}" "${flags[@]}" \
  "${PYTHON:-.venv/bin/python}" train.py "$@"
