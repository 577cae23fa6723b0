"""How far long work has come: one updating line on a terminal, a line every so often in a file or a pipe."""

import sys
import time
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Reports progress towards a known total.

    Args:
      total: how much there is to do, in `unit`.
      initial: how much of it an earlier process did.
      unit: the unit of both: "B", "step".
      seconds: the time between two lines where the stream is no terminal.
      stream: where to write; stderr by default.
    """

    def __init__(self, total: int, initial: int = 0, *, unit: str, seconds: float = 15.0, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._bar = tqdm(
            total=total, initial=initial, unit=unit, unit_scale=unit == "B", file=self._stream, disable=not self._terminal,
            leave=False, dynamic_ncols=True,
        )  # fmt: skip
        self._done = initial
        self._seconds = seconds
        self._last_line = time.monotonic()

    def update(self, done: int, detail: str, line: str) -> None:
        """Says that `done` units are done: `detail` behind the bar of a terminal, `line` elsewhere if it is time for one."""
        self._bar.set_postfix_str(detail, refresh=False)
        self._bar.update(done - self._done)
        self._done = done
        if not self._terminal and time.monotonic() - self._last_line > self._seconds:
            self.print(line)

    def print(self, line: str) -> None:
        """Writes a line that stays."""
        self._last_line = time.monotonic()
        if self._terminal:
            tqdm.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Removes the updating line."""
        self._bar.close()
