# The commands of this repository. PYTHON, 3.11 or newer, is only used to make the virtual environment.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/installed

# The compilers of other chips have a separate environment, because jax tries these chips at every start where they are installed.
GATES_VENV ?= .venv-gates
GATES_RUN := $(GATES_VENV)/bin/python
GATES_READY := $(GATES_VENV)/installed
# Chips whose kernel cost, and plans whose numbers, are compared with the stored ones, and tests that are run (all).
GATES_CHIPS ?= v5e,v5p,v6e,tpu7x
GATES_PLANS ?= 0p7b@v5e:4x4,0p7b@v5e:16x16
GATES_MARKS ?=

# make plan CONFIG=configs/paper.py:2p7b TOPOLOGY=v5e:16x16 PLAN_FLAGS="--mesh data=16,fsdp=16"
CONFIG ?= configs/paper.py:0p7b
TOPOLOGY ?= v5e:4x4
PLAN_FLAGS ?= --config.attention.kind=xsa
GATES_TESTS := tests/kernels/test_gpu_compile.py tests/kernels/test_tpu_compile.py tests/train/test_topology.py tests/plan

DEMO := runs/demo
# Extra flags for both demo trainings. For a short demo: --config.train.num_steps=20 --config.optim.warmup_steps=5
DEMO_FLAGS ?=

# The packages for other devices, beside those of the CPU: make install EXTRA=tpu or EXTRA=cuda12.
EXTRA ?=

.PHONY: demo install test test-all test-fast gates plan plan-table lint format lock docs clean-demo check-python

## Train SA and XSA on text that ships with Python, evaluate both, and print and plot the comparison.
demo: $(READY)
	$(RUN) -m xsa_jax.data.python_text --output $(DEMO)/text
	$(RUN) -m xsa_jax.data.prepare --input '$(DEMO)/text/*.parquet' --tokenizer bytes --output $(DEMO)/tokens --validation-fraction 0.05
	$(RUN) train.py --config configs/demo.py --workdir $(DEMO)/sa --config.data.path=$(DEMO)/tokens --config.attention.kind=sa $(DEMO_FLAGS)
	$(RUN) train.py --config configs/demo.py --workdir $(DEMO)/xsa --config.data.path=$(DEMO)/tokens --config.attention.kind=xsa $(DEMO_FLAGS)
	$(RUN) eval.py --run $(DEMO)/sa --tokens 100000 --samples 0
	$(RUN) eval.py --run $(DEMO)/xsa --tokens 100000 --samples 0
	$(RUN) -m xsa_jax.train.step_time $(DEMO)/sa $(DEMO)/xsa --output $(DEMO)/step_time.json
	$(RUN) -m xsa_jax.compare $(DEMO)/sa $(DEMO)/xsa --step_times $(DEMO)/step_time.json --output $(DEMO)/report

## Delete the runs of the demo, so that the next demo starts anew.
clean-demo:
	rm -rf $(DEMO)

## Make the environment without running anything; with EXTRA for a TPU or NVIDIA GPUs.
install: $(READY)
	@[ -z "$(EXTRA)" ] || [ -f "requirements-$(EXTRA).lock" ] || { echo "error: EXTRA=$(EXTRA): expected tpu or cuda12"; exit 1; }
	[ -z "$(EXTRA)" ] || $(RUN) -m pip install --quiet --requirement requirements-$(EXTRA).lock

test: $(READY)
	$(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

## The tests with the further cases that `make test` leaves out, for minutes more.
test-all: $(READY)
	$(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder -m ""

test-fast: $(READY)
	$(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder -m fast

## Compile kernels and a train step for TPUs and GPUs, without the hardware, and compare the kernels' cost with the stored one.
gates: $(GATES_READY)
	GATES=required $(GATES_RUN) -m pytest -n auto --dist worksteal -m "$(GATES_MARKS)" $(GATES_TESTS)
	PYTHONPATH=kernels $(GATES_RUN) benchmarks/tpu_bundles.py --chips $(GATES_CHIPS) --check benchmarks/results/tpu_bundles.json
	$(GATES_RUN) benchmarks/plans.py --cases $(GATES_PLANS) --check benchmarks/results/plans.json

## Plan a run on TPUs or GPUs that are not here: memory, bytes on the wire, predicted step.
plan: $(GATES_READY)
	PYTHONPATH=kernels:. $(GATES_RUN) -m xsa_jax.plan --config $(CONFIG) --topology $(TOPOLOGY) $(PLAN_FLAGS)

## Plan the paper's sizes on five sets of devices, store the plans, and write their table into docs/pods.md. Takes half an hour.
plan-table: $(GATES_READY)
	$(GATES_RUN) benchmarks/plans.py --out benchmarks/results/plans.json
	$(GATES_RUN) benchmarks/plans.py --table benchmarks/results/plans.json

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

## Write the pages of docs/ that are generated from the code.
docs: $(READY)
	$(RUN) -m xsa_jax.config.table > docs/config.md

## Pin the newest versions that fit pyproject.toml, for every supported Python at once.
lock: $(READY)
	$(RUN) -m pip install --quiet uv
	$(RUN) -m uv pip compile --universal --fork-strategy requires-python --python-version 3.11 --extra dev \
	  --no-header --no-annotate --no-emit-package xsa_kernels --upgrade pyproject.toml --output-file requirements.lock
	$(RUN) -m uv pip compile --universal --fork-strategy requires-python --python-version 3.11 --group gates \
	  --no-header --no-annotate --upgrade --constraint requirements.lock --output-file requirements-gates.lock
	for extra in tpu cuda12; do \
	  $(RUN) -m uv pip compile --universal --fork-strategy requires-python --python-version 3.11 --extra $$extra \
	    --no-header --no-annotate --no-emit-package xsa_kernels --upgrade --constraint requirements.lock pyproject.toml \
	    --output-file requirements-$$extra.lock || exit 1; \
	done

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); xsa_jax needs 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }

$(READY): requirements.lock pyproject.toml kernels/pyproject.toml | check-python
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --requirement requirements.lock
	$(RUN) -m pip install --quiet --no-deps --editable ./kernels --editable .
	touch $@

$(GATES_READY): requirements-gates.lock | check-python
	@[ "$$(uname -sm)" = "Linux x86_64" ] || \
	  { echo "error: the compilers that make gates installs exist for Linux on x86_64 only; this is $$(uname -sm)"; exit 1; }
	$(PYTHON) -m venv $(GATES_VENV)
	$(GATES_RUN) -m pip install --quiet --requirement $<
	touch $@
