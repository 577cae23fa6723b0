"""What train.py and eval.py left in a run's folder, checked as far as a comparison reads it."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from xsa_jax.config import Config
from xsa_jax.config.stored import from_stored
from xsa_jax.errors import UserError
from xsa_jax.labels import STATISTICS

# What each file must hold; it may hold more. A dict stands for an object with these keys, a list of one for a list of one or
# more of its kind, types for a value of one of them.
_NUMBER = (int, float, type(None))  # null, where nothing was there to measure
_BUCKET = {"start": int, "stop": int, "loss": _NUMBER, "tokens": int}
_LOSS = {
    "context": int, "loss": _NUMBER, "bits_per_byte": _NUMBER, "perplexity": _NUMBER, "tokens": int, "buckets": [_BUCKET],
}  # fmt: skip
_EVALUATION = {"store": {"hash": str}, "losses": [_LOSS], "similarity": {name: [[_NUMBER]] for name in STATISTICS}}
_CONFIG = {"attention": {"kind": str}}
_RECORD = {"step": int, "split": str, "loss": _NUMBER}
_START = {"devices": str}
_STEP_TIMES = {"pairs": int, "ratios": dict}


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    config: Config
    records: list[Mapping[str, Any]]  # lines of metrics.jsonl
    evaluations: Mapping[int, Mapping[str, Any]]  # by step
    devices: str


def read(path: pathlib.Path) -> Run:
    """Everything of a run that a comparison needs.

    Raises:
      UserError: a file is missing, damaged or incomplete, with what makes it.
    """
    config = from_stored(_json(path / "config.json", _CONFIG, "train.py writes it"), str(path / "config.json"))
    records = _lines(path / "metrics.jsonl", _RECORD)
    starts = _lines(path / "starts.jsonl", _START)
    if not starts:
        raise UserError(f"{path / 'starts.jsonl'}: expected a line for each start of the run, found none; train.py writes them")
    steps = sorted(int(file.stem) for file in (path / "eval").glob("*.json") if file.stem.isdecimal())
    if not steps:
        raise UserError(f"{path}: not evaluated; run python eval.py --run {path} first")
    evaluations = {
        step: _json(path / "eval" / f"{step}.json", _EVALUATION, f"remove it, or run python eval.py --run {path} --step {step}")
        for step in steps
    }
    return Run(str(path), config, records, evaluations, starts[-1]["devices"])


def read_step_times(path: pathlib.Path) -> Mapping[str, Any]:
    """What `xsa_jax.train.step_time` wrote: "pairs" and, by run, "ratios".

    Raises:
      UserError: the file is missing or damaged.
    """
    advice = "python -m xsa_jax.train.step_time writes it"
    measured = _json(path, _STEP_TIMES, advice)
    for run, ratio in measured["ratios"].items():
        _check(ratio, (int, float), f"{path}: ratios {run}", advice)
    return measured


def _json(path: pathlib.Path, form: Any, advice: str) -> Any:
    try:
        value = json.loads(_text(path, advice))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); {advice}") from None
    _check(value, form, f"{path}:", advice)
    return value


def _lines(path: pathlib.Path, form: Any) -> list[Any]:
    """The objects of a JSONL file, without a last line that a kill cut short: the trainer drops it too when it continues."""
    lines = _text(path, "train.py writes it").splitlines()
    values, advice = [], "restore the file, or remove the line"
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}:"
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{where} not JSON ({error}); {advice}") from None
        _check(value, form, where, advice)
        values.append(value)
    return values


def _text(path: pathlib.Path, advice: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}") from None


def _check(value: Any, form: Any, where: str, advice: str) -> None:
    """Raises: UserError naming the first place where `value` lacks what `form` asks for."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            raise UserError(f"{where} expected an object, found {value!r:.60}; {advice}")
        for key, part in form.items():
            if key not in value:
                raise UserError(f"{where} no {key!r} there; {advice}")
            _check(value[key], part, f"{where} {key}", advice)
    elif isinstance(form, list):
        if not isinstance(value, list) or not value:
            raise UserError(f"{where} expected a list with something in it, found {value!r:.60}; {advice}")
        for index, item in enumerate(value):
            _check(item, form[0], f"{where} {index}", advice)
    elif not isinstance(value, form):
        kinds = " or ".join(kind.__name__ for kind in (form if isinstance(form, tuple) else (form,)))
        raise UserError(f"{where} expected {kinds}, found {value!r:.60}; {advice}")
