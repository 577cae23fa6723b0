"""Conversion jobs over worker processes.

The functions that workers call stand here, not in `prepare`: what a main module defines cannot be found in a worker.
"""

import signal
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from xsa_jax.data import spawn
from xsa_jax.data.convert import Job, convert
from xsa_jax.data.progress import Progress
from xsa_jax.errors import UserError

_POLL_SECONDS = 0.2


def run(jobs: Sequence[Job], progress: Progress, workers: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yields each job with what `convert` returned, as they finish; with one worker in this process.

    Raises:
      UserError: as `convert` does, after the other workers have stopped; also when one of them was killed.
    """
    return _inline(jobs, progress) if workers == 1 else _pool(jobs, progress, workers)


def _inline(jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[Job, dict[str, Any]]]:
    for job in jobs:
        size = job.path.stat().st_size

        def report(tokens: int, fraction: float, size: int = size) -> None:
            progress.add(tokens, int(fraction * size))

        yield job, convert(job, report)


# Shared with the workers: tokens written, bytes read, and whether to stop.
_TOKENS, _BYTES, _STOP = range(3)
_shared: Any = None


def _share(counters: Any) -> None:
    global _shared
    _shared = counters
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how the pool ends the rest after one was killed


class _Stopped(Exception):
    pass


def _work(job: Job) -> dict[str, Any]:
    size = job.path.stat().st_size

    def report(tokens: int, fraction: float) -> None:
        with _shared.get_lock():
            _shared[_TOKENS] += tokens
            _shared[_BYTES] += int(fraction * size)
        if _shared[_STOP]:
            raise _Stopped

    return convert(job, report)


def _pool(jobs: Sequence[Job], progress: Progress, workers: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    context = get_context("spawn")
    counters = context.Array("q", 3)
    pool = futures.ProcessPoolExecutor(min(workers, max(len(jobs), 1)), context, _share, (counters,))
    try:
        with spawn.without_jax():
            waiting = {pool.submit(_work, job): job for job in jobs}
        while waiting:
            done, _ = futures.wait(waiting, _POLL_SECONDS, futures.FIRST_COMPLETED)
            progress.set(counters[_TOKENS], counters[_BYTES])
            for future in done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool as error:
        raise UserError("a worker process was killed (out of memory?); run the same command again to continue") from error
    finally:
        counters[_STOP] = 1
        pool.shutdown(wait=True, cancel_futures=True)
