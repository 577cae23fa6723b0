"""Every test process runs on the CPU and sees eight fake devices, so that meshes are tested without machines that have them."""

import atexit
import os
import shutil
import signal
import tempfile

# Read when jax first asks for devices. A test that wants one device takes `jax.devices()[:1]`; a test that starts another
# process gives it `tests.helpers.subprocess_env`. Level 0 halves the time to compile, which is most of what tests do.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

# All processes of one run of the suite share what they compile; the workers of pytest-xdist inherit the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="xsa_jax_compiled_")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)

# A shell that starts the suite in the background has SIGINT ignored, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take minutes start first, so that no worker is left with one at the end.
_LONGEST = ("test_processes", "test_chaos", "test_run", "test_gpu_triton", "test_mesh", "test_start", "test_loss", "test_step")


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: _LONGEST.index(item.path.stem) if item.path.stem in _LONGEST else len(_LONGEST))
