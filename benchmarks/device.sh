#!/bin/sh
# Everything worth knowing from one GPU within 8 minutes: do the kernels compute the right values there, how fast are they, and what
# does that do to a training step. Needs jax; with flax and optax also the training step. Neither grain nor ml_collections is needed.
#
#   sh benchmarks/device.sh [folder for the JSON files, default benchmarks/results]
#
# PYTHON names another interpreter.
set -u
cd "$(dirname "$0")/.." || exit 1
python="${PYTHON:-python3}"
out="${1:-benchmarks/results}"
mkdir -p "$out"
status=0
export PYTHONPATH="$PWD/kernels:$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" - <<'END' || exit 1
import importlib, jax
print("jax", jax.__version__, jax.devices())
for name in ("xsa_kernels", "xsa_jax.config", "xsa_jax.parallel.mesh", "xsa_jax.train.setup", "xsa_jax.train.step_time"):
    try:
        importlib.import_module(name)
        print("imports", name)
    except ImportError as error:
        print("CANNOT IMPORT", name, error)
        if name == "xsa_kernels":
            raise
END

# The lengths that decide come first: should time run out, what is missing is the least interesting. The Hopper kernels run by
# themselves, for until a device has run them nobody knows that they end.
lengths=2048,512,8192,4096,1024,16384
timeout -k 5 170 "$python" benchmarks/kernels.py --lengths $lengths --repetitions 7 --seconds 110 \
    --implementations "cudnn sa,cudnn xsa,triton sa,triton xsa,xla sa,xla xsa" --out "$out/gpu_kernels.json" || status=1
timeout -k 5 130 "$python" benchmarks/kernels.py --lengths $lengths --repetitions 7 --seconds 80 \
    --implementations "cudnn sa,cudnn xsa,hopper sa,hopper xsa" --out "$out/gpu_hopper.json" || status=1

if "$python" -c "import flax, optax" 2>/dev/null; then
    timeout -k 5 150 "$python" benchmarks/train_step.py --steps 6 --seconds 60 --out "$out/gpu_train_step.json" || status=1
else
    echo "no training step: flax or optax is not here"
fi
exit $status
