"""The thread of each process that ends all of them when one fails, falls silent, or makes no progress.

Without it a process that waits for a failed one waits for minutes or for ever. The processes write to jax's coordination service,
which lives in process 0. That process therefore leaves last.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from xsa_jax.errors import UserError
from xsa_jax.parallel.distributed import client, host, process_index

_FAILED = "xsa_jax/failed"
_PLACES = "xsa_jax/places"
_POLL_SECONDS = 0.5
_SILENT_SECONDS = 30.0
_DONE = "done"


class Lifeline:
    """A context in which this process and the others of the run end together.

    An error that leaves the context reaches every process within two seconds. Each prints the first one's reason and host and exits
    with status 1, without waiting for the others. A process that is alone raises its errors as usual.

    The code in the context says what it does by `at`, with the longest time that this may take. When that time has passed, every
    process prints where each of them was last, and its own stacks, and exits with status 1.
    """

    def __init__(self) -> None:
        self._client = client()
        self._stopped = threading.Event()
        self._place, self._since, self._limit = "start", time.monotonic(), 0.0
        self._pace: dict[str, float] = {}
        self._heard: dict[int, tuple[float, float]] = {}
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)

    def __enter__(self) -> "Lifeline":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None) -> None:
        if error is not None and kind is not SystemExit:
            self.fail_together(error)
        self._stopped.set()
        self._thread.join()
        if self._client is not None:
            self._place = _DONE
            self._beat()

    def at(self, place: str, seconds: float = 0.0) -> None:
        """Says what this process does from now on.

        Args:
          place: a few words, such as "step 12".
          seconds: the longest time until the next call; 0 = no limit.
        """
        self._place, self._since, self._limit = place, time.monotonic(), seconds

    @contextlib.contextmanager
    def ends_all(self) -> Iterator[None]:
        """A context whose errors end all processes before anything is closed: closing a checkpoint waits for the others."""
        try:
            yield
        except Exception as error:
            self.fail_together(error)
            raise

    def slowest(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Publishes seconds by name, and returns those of the slowest process.

        A process that is alone gets its own seconds back, and so does each but process 0, which also gets `NAME_process` for each
        name. The values of the others are up to a second old.
        """
        self._pace = dict(seconds)
        if self._client is None or process_index():
            return dict(seconds)
        result: dict[str, Any] = dict(seconds)
        mine = process_index()
        for name in seconds:
            by_process = {process: said.get("pace", {}).get(name, 0.0) for process, said in self._said().items()}
            by_process[mine] = seconds[name]
            process = max(by_process, key=by_process.__getitem__)
            result |= {name: by_process[process], f"{name}_process": process}
        return result

    def fail_together(self, error: BaseException) -> None:
        """Ends all processes with this error, from any thread. It does nothing where this process is alone."""
        if self._client is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Tells the other processes why this one ends, and ends it. It does not return."""
        if not isinstance(error, UserError):
            sys.excepthook(type(error), error, error.__traceback__)
        lines = str(error).splitlines() or [type(error).__name__]
        self._publish(f"{'' if isinstance(error, UserError) else type(error).__name__ + ': '}{lines[0][:1000]}", stacks=False)
        self._leave()

    def _publish(self, reason: str, stacks: bool) -> None:
        record = {"process": process_index(), "host": host(), "at": self._place, "reason": reason, "stacks": stacks}
        if self._client is not None:
            try:
                self._client.key_value_set(_FAILED, json.dumps(record))
            except Exception:  # another process failed first; its reason is the one to print
                record = self._failure() or record
        self._print(record)

    def _failure(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._client.key_value_try_get(_FAILED))
        except Exception:  # there is none, or the service is gone, and jax then ends this process itself
            return None

    def _print(self, record: dict[str, Any]) -> None:
        mine = record["process"] == process_index()
        if record["stacks"]:
            for process, said in sorted(self._said().items()):
                print(f"process {process}: {said['at']}", file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        where = "" if mine and self._client is None else f"process {record['process']} on {record['host']}, {record['at']}: "
        print(f"error: {where}{record['reason']}", file=sys.stderr)

    def _leave(self) -> None:
        """Ends this process at once: jax's exit handlers would wait for the others."""
        if self._client is not None and process_index() == 0:
            time.sleep(3 * _POLL_SECONDS)  # the others read the reason from the service of this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(_POLL_SECONDS):
            now = time.monotonic()
            if now - last > 10 * _POLL_SECONDS:  # this whole process was stopped, as by ctrl-Z
                self._since += now - last
            last = now
            waited, place, limit = now - self._since, self._place, self._limit
            if self._client is not None:
                self._beat()
                if (failure := self._failure()) is not None:
                    self._print(failure)
                    self._leave()
                if process_index() == 0 and (silent := self._silent()):
                    self._publish(f"nothing heard for {_SILENT_SECONDS:.0f} s from {silent}", stacks=False)
                    self._leave()
            if limit and waited > limit and self._place == place:
                self._publish(f"no progress for {waited:.0f} s in {place!r}, expected at most {limit:.0f} s", stacks=True)
                self._leave()

    def _beat(self) -> None:
        said = json.dumps({"at": f"{self._place} ({host()})", "beat": time.time(), "pace": self._pace})
        try:
            self._client.key_value_set(f"{_PLACES}/{process_index()}", said, allow_overwrite=True)
        except Exception:  # the service is gone, and jax ends this process
            return

    def _said(self) -> dict[int, dict[str, Any]]:
        """What each process said last: `at`, where it was, and `beat`, the time of its own clock."""
        if self._client is None:
            return {0: {"at": self._place}}
        try:
            found = self._client.key_value_dir_get(f"{_PLACES}/")
        except Exception:  # the service is gone
            return {}
        return {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in found}

    def _silent(self) -> str:
        """The processes whose last beat is old, in words; "" if there is none. Only this process's clock measures the time."""
        now, silent = time.monotonic(), []
        for process, said in self._said().items():
            if process not in self._heard or self._heard[process][0] != said["beat"]:
                self._heard[process] = (said["beat"], now)
            elif not said["at"].startswith(_DONE) and now - self._heard[process][1] > _SILENT_SECONDS:
                silent.append(f"process {process}, last at {said['at']}")
        return "; ".join(silent)
