# The environment of a GPU host with a driver for CUDA 12 or newer: docker build -f launch/cuda.Dockerfile -t xsa_jax:cuda .
FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /xsa_jax
COPY . .
RUN make install EXTRA=cuda12 && git config --system --add safe.directory /xsa_jax
ENTRYPOINT [".venv/bin/python"]
CMD ["-m", "xsa_jax.selfcheck"]
