"""The decision to stop before the last step. All processes of a run make it together."""

import signal
import time
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The signals that stop a run politely. Slurm sends SIGUSR1 where a script asks for a warning, a lost terminal sends SIGHUP.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_MAX_HOURS = 1000  # a code that no signal has


class Stopping:
    """Collects the reasons to stop, and decides for all processes at once.

    As a context manager it turns the first SIGTERM, SIGINT, SIGHUP or SIGUSR1 into a reason. A second signal reaches the previous
    handlers. A signal often reaches one process only, or the processes at different steps, so the reason of one process becomes
    that of all by a reduction over the devices. The result is read one poll later, so that no device waits for it.

    Args:
      mesh: mesh of all devices of the run.
      max_hours: time after which the run stops, counted from here; None = no limit.
    """

    def __init__(self, mesh: Mesh, max_hours: float | None = None):
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._max_hours = max_hours
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._alone = jax.process_count() == 1
        self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._devices = mesh.size
        self._most = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._asked: jax.Array | None = None
        self._agreed = 0

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._restore_handlers()

    @property
    def reason(self) -> str | None:
        """The reason that the last `poll` found, in words, equal on all processes; None to go on."""
        if not self._agreed:
            return None
        if self._agreed == _MAX_HOURS:
            return f"--max_hours={self._max_hours:g} have passed"
        return signal.Signals(self._agreed).name

    def poll(self) -> str | None:
        """Asks all processes for a reason to stop, and returns the `reason` that they had at the previous call.

        All processes call it at the same points of the run. A process that is alone learns its reason at once.
        """
        if self._alone:
            self._agreed = self._agreed or self._mine()
            return self.reason
        if self._asked is not None and not self._agreed:
            self._agreed = int(jax.device_get(self._asked))
        mine = np.full((1,), self._mine(), np.int32)
        with jax.transfer_guard_host_to_device("allow"):
            flags = jax.make_array_from_callback((self._devices,), self._split, lambda _: mine)
        self._asked = self._most(flags)
        return self.reason

    def _mine(self) -> int:
        if self._received:
            return self._received
        return _MAX_HOURS if self._deadline is not None and time.monotonic() > self._deadline else 0

    def _receive(self, number: int, _frame: Any) -> None:
        self._received = number
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
