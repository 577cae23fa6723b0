"""What all processes of a run must agree on before they compute together, and what one of them tells the others."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from xsa_jax.errors import UserError
from xsa_jax.parallel.distributed import client, process_count, process_index

_FOLDER = "xsa_jax/said"


def collect(topic: str, mine: Any, seconds: float = 600.0) -> list[Any]:
    """What every process says about a topic, by process index. It waits until all have spoken.

    Args:
      topic: a name that this start of the run uses once.
      mine: what this process says, in plain values.
      seconds: longest time to wait for the others.

    Raises:
      UserError: some processes said nothing in time. The message names them.
    """
    service = client()
    if service is None:
        return [mine]
    folder = f"{_FOLDER}/{topic}"
    service.key_value_set(f"{folder}/{process_index()}", json.dumps(mine))
    try:
        service.wait_at_barrier(f"{folder}/all", int(1000 * seconds))
    except Exception as error:  # jaxlib raises its own types, whose text is a status of the service
        absent = sorted(set(range(process_count())) - _said(service, folder).keys())
        if not absent:
            raise
        raise UserError(f"{topic}: {_processes(absent)} said nothing for {seconds:.0f} s; look at what they printed") from error
    said = _said(service, folder)
    return [said[index] for index in range(process_count())]


def tell(topic: str, value: Any) -> Any:
    """What process 0 says about a topic; the value of the others is ignored. It waits as `collect` does."""
    return collect(topic, value if process_index() == 0 else None)[0]


def agree(topic: str, facts: Mapping[str, Any]) -> None:
    """Compares facts that must be equal in all processes.

    Args:
      topic: as for `collect`.
      facts: plain values by name.

    Raises:
      UserError: a fact differs. Every process raises the same message, which names each such fact with its values and processes.
    """
    said = collect(topic, dict(facts))
    names = sorted({name for one in said for name in one})
    differing = [name for name in names if any(one.get(name) != said[0].get(name) for one in said)]
    if differing:
        listed = "; ".join(f"{name} is {_by_process([one.get(name) for one in said])}" for name in differing)
        raise UserError(f"the processes of this run differ: {listed}. Start all with the same command, code and folders")


def _said(service: Any, folder: str) -> dict[int, Any]:
    found = service.key_value_dir_get(f"{folder}/")
    return {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in found}


def _by_process(values: Sequence[Any]) -> str:
    """Which processes have which value, such as "3 on processes 0-6, 4 on process 7"."""
    groups: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(json.dumps(value), []).append(index)
    return ", ".join(f"{value} on {_processes(group)}" for value, group in groups.items())


def _processes(indices: Sequence[int]) -> str:
    """Process indices in words, such as "processes 0-2, 5"."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"{'process' if len(indices) == 1 else 'processes'} {listed}"
