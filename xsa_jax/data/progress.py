"""How far a preparation has come."""

import sys
import time

from tqdm import tqdm

_LINE_SECONDS = 15.0


class Progress:
    """A bar on a terminal, a line now and then elsewhere; tokens per second and the time left."""

    def __init__(self, total_bytes: int, done_bytes: int):
        self._bar = tqdm(total=total_bytes, initial=done_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        self._total, self._initial = total_bytes, done_bytes
        self._tokens = self._bytes = 0
        self._began = self._said = time.monotonic()

    def add(self, tokens: int, size: int) -> None:
        self.set(self._tokens + tokens, self._bytes + size)

    def set(self, tokens: int, size: int) -> None:
        """Both counted from the start of this process."""
        now = time.monotonic()
        rate = tokens / max(now - self._began, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(size - self._bytes)
        self._tokens, self._bytes = tokens, size
        if self._bar.disable and now - self._said > _LINE_SECONDS:
            self._said = now
            left = (self._total - self._initial - size) * (now - self._began) / max(size, 1)
            done = (self._initial + size) / max(self._total, 1)
            print(f"prepare: {done:.1%}, {tokens:,} tokens, {rate:,.0f} tokens/s, {left:,.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()
