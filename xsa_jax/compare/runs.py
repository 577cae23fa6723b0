"""Reading of the files that train.py and eval.py wrote for a run, with checks of all that a comparison needs."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from xsa_jax.config import Config
from xsa_jax.config.stored import from_stored
from xsa_jax.errors import UserError
from xsa_jax.labels import STATISTICS

# The form of each file, which may hold more. A dict means an object with these keys. A list of one form means a non-empty list of
# that form. A type, or a tuple of types, means a value of such a type.
_NUMBER = (int, float, type(None))  # null stands for a number that does not exist
_BUCKET = {"start": int, "stop": int, "loss": _NUMBER, "tokens": int}
_LOSS = {
    "context": int, "loss": _NUMBER, "bits_per_byte": _NUMBER, "perplexity": _NUMBER, "tokens": int, "buckets": [_BUCKET],
}  # fmt: skip
_EVALUATION = {"store": {"hash": str}, "losses": [_LOSS], "similarity": {name: [[_NUMBER]] for name in STATISTICS}}
_CONFIG = {"attention": {"kind": str}}
_RECORD = {"step": int, "split": str, "loss": _NUMBER}
_START = {"devices": str}
_STEP_TIMES = {"pairs": int, "ratios": dict, "configs": dict}


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run that a comparison needs."""

    name: str  # path of the run's folder
    config: Config
    records: list[Mapping[str, Any]]  # lines of metrics.jsonl
    evaluations: Mapping[int, Mapping[str, Any]]  # by step
    devices: str  # number and kind of the devices, at the last start


def read(path: pathlib.Path) -> Run:
    """Reads the files of a run.

    Args:
      path: folder of the run.

    Raises:
      UserError: a file is missing, damaged or incomplete. The message names the command that writes it.
    """
    config = from_stored(_read_json(path / "config.json", _CONFIG, "train.py writes it"), str(path / "config.json"))
    records = _read_lines(path / "metrics.jsonl", _RECORD)
    starts = _read_lines(path / "starts.jsonl", _START)
    if not starts:
        raise UserError(f"{path / 'starts.jsonl'}: expected a line for each start of the run, found none; train.py writes them")
    steps = sorted(int(file.stem) for file in (path / "eval").glob("*.json") if file.stem.isdecimal())
    if not steps:
        raise UserError(f"{path}: not evaluated; run python eval.py --run {path} first")
    evaluations = {
        step: _read_json(
            path / "eval" / f"{step}.json", _EVALUATION, f"remove it, or run python eval.py --run {path} --step {step}"
        )
        for step in steps
    }
    return Run(str(path), config, records, evaluations, starts[-1]["devices"])


def read_step_times(path: pathlib.Path) -> Mapping[str, Any]:
    """Reads the output file of `xsa_jax.train.step_time`: "pairs", and "ratios" by run.

    Raises:
      UserError: the file is missing or damaged.
    """
    advice = "python -m xsa_jax.train.step_time writes it"
    measured = _read_json(path, _STEP_TIMES, advice)
    for run, ratio in measured["ratios"].items():
        _check(ratio, (int, float), f"{path}: ratios {run}", advice)
    return measured


def _read_json(path: pathlib.Path, form: Any, advice: str) -> Any:
    try:
        value = json.loads(_read_text(path, advice))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); {advice}") from None
    _check(value, form, f"{path}:", advice)
    return value


def _read_lines(path: pathlib.Path, form: Any) -> list[Any]:
    """The objects of a JSONL file, without a last line that a kill cut short. A continued run drops this line, too."""
    lines = _read_text(path, "train.py writes it").splitlines()
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


def _read_text(path: pathlib.Path, advice: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}") from None


def _check(value: Any, form: Any, where: str, advice: str) -> None:
    """Checks that a value has a form.

    Raises:
      UserError: it does not. The message names the first place that differs.
    """
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
