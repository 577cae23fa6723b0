"""Every test process runs on the CPU and sees eight fake devices, so that meshes are tested without machines that have them."""

import os

# Before the first `import jax`, which reads both. A test that wants one device takes `jax.devices()[:1]`; a test that starts
# another process gives it `tests.helpers.subprocess_env`.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
