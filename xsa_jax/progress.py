"""Progress of long work: a progress bar on a terminal, and a line at intervals in a file or a pipe."""

import sys
import time
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Reports progress towards a known total.

    Args:
      total: amount of work, in `unit`.
      initial: amount of work that earlier processes did, in `unit`.
      unit: unit of work, such as "B" or "step".
      keep: whether the last state of a terminal's line stays when the work is done.
      seconds: interval between two lines where the stream is not a terminal.
      stream: output stream; stderr by default.
    """

    def __init__(
        self, total: int, initial: int = 0, *, unit: str, keep: bool = False, seconds: float = 15.0, stream: TextIO | None = None
    ):
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._bar = tqdm(
            total=total, initial=initial, unit=unit, unit_scale=unit == "B", file=self._stream, disable=not self._is_terminal,
            leave=keep, dynamic_ncols=True,
        )  # fmt: skip
        self._reported = initial
        self._seconds = seconds
        self._last_line_time = time.monotonic()

    def update(self, done: int, detail: str, line: str) -> None:
        """Shows new progress.

        Args:
          done: total amount of work done, `initial` included, in `unit`.
          detail: text behind the bar of a terminal.
          line: text for any other stream, written at most once per interval.
        """
        self._bar.set_postfix_str(detail, refresh=False)
        self._bar.update(done - self._reported)
        self._reported = done
        if not self._is_terminal and time.monotonic() - self._last_line_time > self._seconds:
            self.print(line)

    def print(self, line: str) -> None:
        """Writes a line that later progress does not overwrite."""
        self._last_line_time = time.monotonic()
        if self._is_terminal:
            tqdm.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Removes the progress bar."""
        self._bar.close()
