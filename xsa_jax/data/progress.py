"""Progress of a preparation, in bytes of input and in tokens."""

import time

from xsa_jax import progress


class Progress:
    """Shows the share of input read, the tokens per second and the time left.

    Args:
      total_bytes: size of all input files.
      done_bytes: size of the input files that earlier processes converted.
    """

    def __init__(self, total_bytes: int, done_bytes: int):
        self._display = progress.Progress(total_bytes, done_bytes, unit="B", keep=True)
        self._total, self._initial = total_bytes, done_bytes
        self._tokens = self._bytes = 0
        self._began = time.monotonic()

    def add(self, tokens: int, size: int) -> None:
        """Adds the tokens written and the input bytes read since the last call."""
        self.set(self._tokens + tokens, self._bytes + size)

    def set(self, tokens: int, size: int) -> None:
        """Sets the tokens written and the input bytes read since this process started."""
        seconds = time.monotonic() - self._began
        rate = tokens / max(seconds, 1e-9)
        self._tokens, self._bytes = tokens, size
        left = (self._total - self._initial - size) * seconds / max(size, 1)
        done = (self._initial + size) / max(self._total, 1)
        line = f"prepare: {done:.1%}, {tokens:,} tokens, {rate:,.0f} tokens/s, {left:,.0f} s left"
        self._display.update(self._initial + size, f"{rate:,.0f} tokens/s", line)

    def close(self) -> None:
        """Removes the progress bar."""
        self._display.close()
