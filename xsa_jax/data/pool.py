"""Distribution of conversion jobs over worker processes.

The functions that workers call are defined here and not in `prepare`, because a worker cannot import them from the main module.
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
    """Yields each job with the result of `convert`, in the order in which the jobs finish.

    Args:
      jobs: the conversions to do.
      progress: display to update while the jobs run.
      workers: number of worker processes; with 1 this process does the conversions.

    Raises:
      UserError: a conversion raised it, or a worker was killed. The other workers have stopped by then.
    """
    return _run_here(jobs, progress) if workers == 1 else _run_in_workers(jobs, progress, workers)


def _run_here(jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[Job, dict[str, Any]]]:
    for job in jobs:
        size = job.path.stat().st_size

        def report(tokens: int, fraction: float, size: int = size) -> None:
            progress.add(tokens, int(fraction * size))

        yield job, convert(job, report)


# Indices into `_shared`, an array that all workers share: tokens written, bytes read, and a flag that tells workers to stop.
_TOKENS, _BYTES, _STOP = range(3)
_shared: Any = None


def _init_worker(counters: Any) -> None:
    global _shared
    _shared = counters
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool sends SIGTERM to the remaining workers after one was killed


class _Stopped(Exception):
    pass


def _convert_in_worker(job: Job) -> dict[str, Any]:
    size = job.path.stat().st_size

    def report(tokens: int, fraction: float) -> None:
        with _shared.get_lock():
            _shared[_TOKENS] += tokens
            _shared[_BYTES] += int(fraction * size)
        if _shared[_STOP]:
            raise _Stopped

    return convert(job, report)


def _run_in_workers(jobs: Sequence[Job], progress: Progress, workers: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    context = get_context("spawn")
    counters = context.Array("q", 3)
    pool = futures.ProcessPoolExecutor(min(workers, max(len(jobs), 1)), context, _init_worker, (counters,))
    try:
        with spawn.without_jax():
            waiting = {pool.submit(_convert_in_worker, job): job for job in jobs}
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
