"""Worker processes in which jax cannot be imported.

A spawned worker imports the main module of its parent, and a trainer's main module imports jax. Grain also imports jax and orbax
where they are installed. A worker with jax can block on the accelerator of its parent, or take it. Therefore `without_jax` names
this module as the main module while workers start. A worker then runs this module before any other code.
"""

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def without_jax() -> Iterator[None]:
    """A context in which multiprocessing spawns workers that cannot import jax.

    The parent alone ends such a worker, and the worker exits when its parent dies. It ignores SIGINT and SIGTERM, because ctrl-C
    and a scheduler's notice reach the whole process group, while the parent still needs its workers to finish the current step.
    """
    main = sys.modules["__main__"]
    spec = main.__spec__
    main.__spec__ = importlib.util.find_spec("xsa_jax.data.spawn")
    try:
        yield
    finally:
        main.__spec__ = spec


def _exit_with_parent(parent: int) -> None:
    # A parent killed by SIGKILL cannot stop its workers; they would wait on their queues forever.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _quiet_grain() -> None:
    from absl import logging

    logging.get_absl_logger().addFilter(lambda record: "Failed to load jax profiler" not in str(record.msg))


if __name__ == "__mp_main__":
    for blocked in ("jax", "jaxlib", "flax", "orbax"):
        sys.modules[blocked] = None  # type: ignore[assignment]
    _quiet_grain()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
