"""What a program that computes sets once for its process, before it asks jax for devices."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform

import jax

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def prepare_process() -> None:
    """Keeps freed memory where jax has only the CPU, and keeps compiled programs on disk."""
    keep_freed_memory()
    keep_compiled_programs()


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory for its next use, where jax has only the CPU.

    XLA allocates the temporary arrays of a program anew whenever it runs. glibc takes that much memory from the system each time,
    page by page, and gives it back. Other C libraries are left as they are.
    """
    if _has_accelerator_plugin() and os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return
    mallopt(_MMAP_MAX, 0)  # large blocks come from the heap too
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # the heap does not shrink
    mallopt(_ARENA_MAX, 1)  # there is one heap: those of threads are limited to 64 MiB


def keep_compiled_programs() -> None:
    """Makes jax keep compiled programs in a folder of the user's cache, so that the second start of a run compiles nothing.

    JAX_COMPILATION_CACHE_DIR names another folder, and JAX_ENABLE_COMPILATION_CACHE=false keeps none, as for every program that
    uses jax. Each kind of CPU has a folder of its own, because a program for a CPU may use any of its instructions, and unlike
    machines may share a home folder.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(home) / "xsa_jax" / "compiled" / _kind_of_cpu()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _kind_of_cpu() -> str:
    """The architecture and a digest of the instruction sets of this CPU, such as "x86_64-1f0a3b5c"."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = [f"flags: {platform.processor()}"]
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _has_accelerator_plugin() -> bool:
    """Whether jax is installed with support for a device other than the CPU."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(importlib.util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))
