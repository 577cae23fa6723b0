"""A plan in words and numbers, with each assumption beside it."""

import math

from xsa_jax.plan.predict import Plan, summed

_GiB, _GB = 2.0**30, 1e9


def report(plan: Plan) -> str:
    """The plan of one run."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    lines = [
        f"{plan.topology}: {plan.devices} devices, mesh {mesh}, remat {plan.remat}, "
        f"{plan.loss_chunk_tokens} tokens to a chunk of the loss",
        f"compiled in {plan.compile_seconds:.0f} s with {plan.options or 'no options'}",
        "",
        f"memory of a device: {plan.memory['needed'] / _GiB:.2f} of {plan.available / _GiB:.2f} GiB",
        *(
            f"  {name:12} {plan.memory[name] / _GiB:8.3f} GiB"
            for name in ("parameters", "optimiser", "batch", "temporaries", "program")
        ),
    ]
    if plan.memory["host"]:
        lines.append(f"  in the host's memory {plan.memory['host'] / _GiB:.3f} GiB")
    lines += ["", "bytes that a device sends in a step (of rings; an all-reduce counts twice):"]
    for row in summed(plan.program):
        if row["wire"] > 1e-4 * plan.program.wire():
            place = "in a loop" if row["in_loop"] else "outside loops"
            waits = "the device waits" if row["synchronous"] else "beside computation"
            lines.append(
                f"  {row['kind']:18} {row['dtype']:4} {row['times']:6} times {row['wire'] / _GB:8.3f} GB, "
                f"groups of {row['group']}, {place}, {waits}"
            )
    waited = plan.program.wire(synchronous=True)
    lines += [f"  total {plan.program.wire() / _GB:.3f} GB, of which the device waits for {waited / _GB:.3f} GB", ""]
    if math.isnan(plan.step):
        lines.append(
            f"step: not predicted, since the clock of this chip is not published; {sum(plan.cycles.values()) / 1e6:.1f}M cycles"
        )
        return "\n".join(lines)
    lines.append(f"predicted step: {1e3 * plan.step:.1f} ms")
    if plan.cycles:
        loops = plan.program.cycles_in_loops / max(1, plan.program.cycles)
        lines += [
            f"  {1e3 * plan.seconds['fusions']:8.1f} ms  XLA's estimate of {plan.cycles['fusions'] / 1e6:.1f}M cycles, "
            f"{100 * loops:.0f}% of them in loops (assumes the chip's nominal clock)",
            f"  {1e3 * plan.seconds['kernels']:8.1f} ms  {plan.cycles['kernels'] / 1e6:.1f}M bundles of attention kernels "
            f"(assumes that they never wait for memory)",
        ]
    else:
        lines.append(f"  {1e3 * plan.seconds['products']:8.1f} ms  all computed FLOPs at the peak (no program reaches it)")
    lines += [
        f"  {1e3 * plan.seconds['waiting']:8.1f} ms  waits for collectives (assumes the full bandwidth of their links)",
        f"  {1e3 * plan.wire_seconds:8.1f} ms  all collectives on the links; the step is not shorter",
        f"most of it: {plan.bound}",
        "",
        f"{plan.tokens / plan.step:,.0f} tokens/s, MFU {100 * plan.mfu:.1f}% (causal), HFU {100 * plan.hfu:.1f}%",
    ]
    days = plan.num_steps * plan.step / 86400
    lines.append(
        f"{plan.num_steps:,} steps: {days:.2f} days, {24 * days * plan.devices:,.0f} device-hours (without validation, saves)"
    )
    return "\n".join(lines)
