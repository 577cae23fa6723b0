"""Worker processes in which jax cannot be imported.

A spawned worker imports the main module of its parent anew, and a trainer's main module imports jax; Grain imports jax
and orbax when it finds them. A worker that has jax can wait for, or take, the accelerator that its parent holds. So while workers
start, `without_jax` names this module as the main one. In the worker it then runs before anything else does.
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
    """Processes spawned by multiprocessing inside this context cannot import jax and outlive no parent, which alone ends them.

    They ignore SIGINT and SIGTERM: ctrl-C and a scheduler's notice reach the whole process group, and the parent still needs
    its workers to finish the step under way.
    """
    main = sys.modules["__main__"]
    spec = main.__spec__
    main.__spec__ = importlib.util.find_spec("xsa_jax.data.spawn")
    try:
        yield
    finally:
        main.__spec__ = spec


def _exit_with(parent: int) -> None:
    # A parent killed by SIGKILL cannot stop its workers; they would wait on their queues for ever.
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
    for notice in (signal.SIGINT, signal.SIGTERM):
        signal.signal(notice, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
