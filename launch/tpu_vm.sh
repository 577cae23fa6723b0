#!/usr/bin/env bash
# A training run on all hosts of a Cloud TPU slice, from a machine with gcloud:
#   TPU=name ZONE=us-west4-a launch/tpu_vm.sh --config configs/paper.py:0p7b --workdir /mnt/shared/runs/x
# Every host has this repository in ~/xsa_jax, installed with `make install EXTRA=tpu`. See docs/launch.md.
set -euo pipefail

arguments=$(printf ' %q' "$@")
exec gcloud compute tpus tpu-vm ssh "${TPU:?set TPU to the name of the slice}" --zone="${ZONE:?set ZONE}" --worker=all \
  --command="cd ~/xsa_jax && exec .venv/bin/python train.py$arguments"
