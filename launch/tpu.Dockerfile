# The environment of a TPU host: docker build -f launch/tpu.Dockerfile -t xsa_jax:tpu .
FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /xsa_jax
COPY . .
RUN make install EXTRA=tpu && git config --system --add safe.directory /xsa_jax
ENTRYPOINT [".venv/bin/python"]
CMD ["-m", "xsa_jax.selfcheck"]
