"""What a compiled TPU or GPU program does in one run, read from its HLO text.

A loop body counts as often as the loop runs it, which XLA's own `cost_analysis` does not do.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
# A rolled loop whose bound cannot be read would count as one trip, and every number would be too small.
_NO_TRIPS = "the trips of loop {} cannot be read from the HLO text; this version of XLA writes loops in another way"


class Collective(NamedTuple):
    """All runs of one collective operation in a program.

    Attributes:
      kind: name of the operation, such as "all-gather". An all-reduce of which each device keeps its part is a "reduce-scatter".
      dtype: HLO's name of the element type, such as "bf16".
      group: number of devices that take part in each.
      times: number of runs.
      wire: bytes that each device sends in all runs, as rings do: (n - 1) / n of the whole array, and twice that for an all-reduce.
      in_loop: whether it runs inside a loop.
      synchronous: whether the device waits for it and does nothing else.
      source: the operation of the traced program that it stems from.
    """

    kind: str
    dtype: str
    group: int
    times: int
    wire: float
    in_loop: bool
    synchronous: bool
    source: str


class Kernel(NamedTuple):
    """All runs of one Pallas kernel on TPU, with the shape [B, H, T, E] of its first result on one device."""

    name: str
    shape: tuple[int, ...]
    times: int


@dataclasses.dataclass
class Program:
    """The work of one run of a compiled program on one device.

    Attributes:
      cycles: XLA's estimate of cycles in fusions, outside of Pallas kernels; 0 on GPUs, for which XLA writes none.
      cycles_in_loops: those inside loops.
      collectives: operations between devices.
      kernels: Pallas kernels of a TPU.
    """

    cycles: int = 0
    cycles_in_loops: int = 0
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    kernels: list[Kernel] = dataclasses.field(default_factory=list)

    def wire(self, *, synchronous: bool | None = None, in_loop: bool | None = None) -> float:
        """Bytes that each device sends in one run, of all collectives or of those with these properties."""
        return sum(
            c.wire
            for c in self.collectives
            if synchronous in (None, c.synchronous) and in_loop in (None, c.in_loop)
        )  # fmt: skip


class _Instruction(NamedTuple):
    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    root: bool


def read(text: str) -> Program:
    """The program of an optimised HLO module, `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: the trips of a loop cannot be read.
    """
    computations, entry = _parse(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    program = Program()
    seen: set[tuple[str, str]] = set()

    def walk(name: str, times: int, in_loop: bool, fused: bool) -> None:
        for instruction in computations[name]:
            if match := re.search(r'"estimated_cycles":"(\d+)"', instruction.rest):
                program.cycles += int(match[1]) * times
                program.cycles_in_loops += int(match[1]) * times if in_loop else 0
            if instruction.op == "while":
                condition, body = _attribute(instruction.rest, "condition"), _attribute(instruction.rest, "body")
                trips = _trips(instruction, computations[condition], computations[body])
                walk(body, times * trips, True, fused)
                continue
            kind = instruction.op.removesuffix("-start")
            if kind in _COLLECTIVES:
                # One asynchronous collective is written several times, in the fusions that start, continue and end it.
                channel = re.search(r"channel_id=(\d+)", instruction.rest)
                key = (channel[1] if channel else instruction.name, kind)
                if key not in seen or kind == "collective-permute":
                    seen.add(key)
                    program.collectives.append(_collective(instruction, kind, devices, name, times, in_loop, fused))
            if "tpu_custom_call" in instruction.rest:
                dims = re.search(r"\[([\d,]+)\]", instruction.shape)
                shape = tuple(int(n) for n in dims[1].split(",")) if dims else ()
                program.kernels.append(Kernel(instruction.name.rsplit(".", 1)[0], shape, times))
            if not instruction.op.endswith(("-done", "-update")):  # what they end was counted where it starts
                for called in _called(instruction.rest):
                    if called in computations:
                        walk(called, times, in_loop, True)

    walk(entry, 1, False, False)
    return program


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of every computation, and the name of the entry."""
    computations: dict[str, list[_Instruction]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            current = match[2]
            computations[current] = []
            entry = current if match[1] else entry
        elif line.startswith("}"):
            current = ""
        elif current and (match := re.match(r"\s*(ROOT )?%?([\w.\-]+) = (.*)$", line)):
            shape, rest = _split_shape(match[3])
            if found := re.match(r"([\w\-]+)\((.*)$", rest):
                computations[current].append(_Instruction(match[2], shape, found[1], found[2], bool(match[1])))
    return computations, entry


def _split_shape(text: str) -> tuple[str, str]:
    """A shape, which may be a tuple of shapes, and what follows it."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: i + 1], text[i + 2 :]
    return text, ""


def _attribute(rest: str, name: str) -> str:
    match = re.search(rf"{name}=%?([\w.\-]+)", rest)
    assert match, (name, rest[:200])
    return match[1]


def _called(rest: str) -> Iterator[str]:
    for one, several in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)|(?:called|branch)_computations=\{([^}]*)\}", rest):
        yield from [one] if one else re.findall(r"[\w.\-]+", several)


def _operands(instruction: _Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.rest.split("), ")[0])


def _trips(loop: _Instruction, condition: list[_Instruction], body: list[_Instruction]) -> int:
    """How often a loop runs: as XLA says, or from a counter that starts at 0, its bound and its increment.

    Raises:
      ValueError: the loop has another form.
    """
    if match := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(match[1])
    compared = next((i for i in condition if i.root and i.op == "compare"), None)
    constants = _constants(condition)
    if compared is None:  # the comparison is a fusion; its bound is the condition's only constant
        bounds, elements = list(constants.values()), [i for i in condition if i.op == "get-tuple-element"]
    else:
        bounds = [constants[name] for name in _operands(compared) if name in constants]
        elements = [i for i in condition if i.name in _operands(compared) and i.op == "get-tuple-element"]
    if len(bounds) != 1 or len(elements) != 1:
        raise ValueError(_NO_TRIPS.format(loop.name))
    index = re.search(r"index=(\d+)", elements[0].rest)
    assert index
    increment = _increment(body, int(index[1]))
    if not increment:
        raise ValueError(_NO_TRIPS.format(loop.name))
    return max(1, -(-bounds[0] // increment))


def _constants(computation: list[_Instruction]) -> dict[str, int]:
    found = ((i.name, re.match(r"(-?\d+)\)", i.rest)) for i in computation if i.op == "constant")
    return {name: int(match[1]) for name, match in found if match}


def _increment(body: list[_Instruction], index: int) -> int:
    """What a loop body adds to one element of its state."""
    by_name, constants = {i.name: i for i in body}, _constants(body)
    root = next(i for i in body if i.root)
    if root.op != "tuple":
        return 0
    current: str | None = _operands(root)[index]
    total = 0
    while current in by_name:
        instruction = by_name[current]
        if instruction.op == "add":
            total += sum(constants.get(name, 0) for name in _operands(instruction))
            current = next((name for name in _operands(instruction) if name not in constants), None)
        elif instruction.op in ("copy", "bitcast"):
            current = _operands(instruction)[0]
        else:
            return total
    return total


def _collective(
    instruction: _Instruction, kind: str, devices: int, computation: str, times: int, in_loop: bool, fused: bool
) -> Collective:  # fmt: skip
    sizes = [
        (dtype, _BYTES[dtype] * _product(dims))
        for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", instruction.shape)
        if dtype in _BYTES
    ]
    size, n = sum(size for _, size in sizes), _group(instruction.rest, devices)
    start = instruction.op.endswith("-start")
    if kind == "collective-permute":
        size, share = sizes[0][1], 1.0
    elif kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind, share = "reduce-scatter", (n - 1) / n  # the shape is that of the whole array
    elif start and kind in ("all-gather", "reduce-scatter"):
        share = (n - 1) / (n + 1)  # the shape is that of the whole array and of a part
    else:
        share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0}.get(kind, (n - 1) / n)
    asynchronous = fused or start or "async_collective_name" in instruction.rest
    name = re.search(r'op_name="(?:jit\(\w+\)/)?([^"]*)"', instruction.rest)
    return Collective(
        kind, sizes[0][0] if sizes else "?", n, times, size * share * times, in_loop, not asynchronous, name[1] if name else ""
    )  # fmt: skip


def _product(dims: str) -> int:
    total = 1
    for dim in dims.split(","):
        total *= int(dim) if dim else 1
    return total


def _group(rest: str, all_devices: int) -> int:
    """The number of devices of each group of a collective, in any of the forms in which HLO writes groups."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        total = 1
        for name in re.findall(r"'(\w+)'", match[2]):
            total *= sizes[name]
        return total
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return match[1].count(",") + 1
    return all_devices
