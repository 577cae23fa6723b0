import sys
import types

import pytest

from xsa_jax import progress as shown_progress
from xsa_jax.data import progress


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    for module in (progress, shown_progress):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.fast
def test_a_line_now_and_then_tells_the_rate_and_the_time_left(clock, capsys):
    shown = progress.Progress(total_bytes=1000, done_bytes=200)
    clock.now += 10
    shown.add(1000, 100)
    assert capsys.readouterr().err == ""
    clock.now += 10
    shown.add(3000, 100)  # 200 bytes in 20 s, so the other 600 take 60 s
    shown.add(0, 0)
    assert capsys.readouterr().err == "prepare: 40.0%, 4,000 tokens, 200 tokens/s, 60 s left\n"
    shown.close()


def test_a_terminal_gets_a_bar_instead(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = progress.Progress(total_bytes=1000, done_bytes=200)
    clock.now += 20
    shown.set(4000, 200)
    shown.close()
    shown = capsys.readouterr().err
    assert "40%|" in shown
    assert "200 tokens/s" in shown
    assert "prepare:" not in shown
