"""The static cost of the TPU kernels, on a machine that has no TPU: VLIW bundles of each region times how often the region runs.

    python benchmarks/tpu_bundles.py --out benchmarks/results/tpu_bundles.json
    python benchmarks/tpu_bundles.py --check benchmarks/results/tpu_bundles.json

One bundle is one issued instruction word, so the weighted sum is the cycles of a kernel that never waits for memory. It is
deterministic for one libtpu, and knows nothing of copies that are not hidden. Compared at the same block sizes, 1024 queries and
1024 keys: the fused kernels with the projection (`xsa`), the same kernels without it (`plain`), and jax's own splash attention
(`splash`; its backward pass is two kernels), for one head of T = 4096 tokens, E = 128, causal, bfloat16. Beside them, in the
compiler's estimate of cycles, what XLA adds `around` the kernels: rowsum(z * dz) for splash, and the projection as a separate
epilogue (`composed`).

Needs `pip install "jax[tpu]"` and xsa_kernels, installed or by PYTHONPATH=kernels. Takes a few minutes for each chip.
"""

import argparse
import concurrent.futures
import datetime
import glob
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
T, E = 4096, 128
BLOCK = 1024  # that of our table; of a block splash takes `COMPUTE` keys at a time
COMPUTE = 512
# The regions of a kernel, in program order, that run under a condition; everything else of the loop runs at every step.
FORWARD = ("first", "whole", "diagonal")
BACKWARD = ("first", "whole", "diagonal", "done", "last")
SPLASH = ("first", "run", "last")
KERNELS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("xsa", "forward"): {"xsa_forward": FORWARD},
    ("plain", "forward"): {"attention_forward": FORWARD},
    ("splash", "forward"): {"splash_mha_fwd": SPLASH},
    ("xsa", "backward"): {"xsa_backward": BACKWARD},
    ("plain", "backward"): {"attention_backward": BACKWARD},
    ("splash", "backward"): {"splash_mha_dq": SPLASH, "splash_mha_dkv": SPLASH},
}
# Conditional regions smaller than this are the pipeline's own (start a copy, wait for a copy).
SMALLEST_REGION = 62


def trips(regions: tuple[str, ...]) -> dict[str, int]:
    """How often each region runs for one head; `step` is every grid step. Splash's grid is the whole rectangle of blocks."""
    n = T // BLOCK
    pairs = n * (n + 1) // 2
    if regions is SPLASH:
        return {"step": n * n, "first": n, "run": pairs, "last": n}
    return {"step": pairs, "first": n, "last": n, "done": n, "whole": pairs - n, "diagonal": n}


def regions_of(listing: str) -> list[tuple[int, int, int]]:
    """(first bundle, bundles, id) of every region in a listing of final bundles."""
    address, opened, found = -1, {}, []
    for line in listing.splitlines():
        if match := re.match(r"\s*(0x[0-9a-f]+)\s", line):
            address = int(match[1], 16)
        for kind, name in re.findall(r"(Start|End|Start/End empty) region (\d+)", line):
            if kind == "Start":
                opened[name] = address
            elif name in opened:
                found.append((opened[name], address + 1 - opened[name], int(name)))
    return found


def weigh(listing: str, regions: tuple[str, ...]) -> dict[str, int]:
    """Bundles of each conditional region, of one grid step without them, and the sum weighted by trips."""
    found = sorted({(start, size) for start, size, name in regions_of(listing) if name > 1 and size >= SMALLEST_REGION})

    def inside(region):
        """The regions directly inside one region."""
        start, size = region
        within = [(a, n) for a, n in found if start <= a and a + n <= start + size and n < size]
        return [r for r in within if not any(a <= r[0] and r[0] + r[1] <= a + n and n > r[1] for a, n in within)]

    # The loop over the grid is wrapped in regions that hold little else.
    loop = outer_region = max(found, key=lambda region: region[1])
    while len(outer := inside(outer_region)) == 1:
        outer_region = outer[0]
    size = loop[1]
    if len(outer) < len(regions):
        raise SystemExit(f"expected the regions {regions}, found (address, bundles) {outer}")
    # Whatever large region comes before them belongs to the pipeline.
    outer = outer[len(outer) - len(regions) :]
    # What is under one more condition inside, behind a region's own code, is for values shorter than eps and never runs.
    sizes = {name: n - sum(m for a, m in inside((start, n)) if a > start) for name, (start, n) in zip(regions, outer, strict=True)}
    sizes["step"] = size - sum(n for _, n in outer)
    often = trips(regions)
    return sizes | {"weighted": sum(n * often[name] for name, n in sizes.items())}


def child(chip: str, kind: str, direction: str) -> None:
    """Compiles one kernel; prints the compiler's estimate of cycles of everything in the program but Pallas calls."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from xsa_kernels import MaskSpec, Projection, frame, reference, tpu
    from xsa_kernels.request import make_request
    from xsa_kernels.tpu import schedule

    if any((blocks.q, blocks.kv) != (BLOCK, BLOCK) for blocks in (schedule.forward_blocks(E), schedule.backward_blocks())):
        raise SystemExit(f"the regions were counted for blocks of {BLOCK}, which are no longer those of tpu/schedule.py")

    def ours(xsa):
        def attend(q, k, v):
            return frame.attention(tpu.backend(), make_request(q, k, v, mask=MaskSpec(), xsa=xsa, scale=E**-0.5), None)

        return attend

    def composed(q, k, v):
        z = reference.project(ours(None)(q, k, v).astype(jnp.float32)[:, :, :, None], v, Projection())
        return z.reshape(q.shape).astype(q.dtype)

    def theirs(q, k, v):
        sizes = splash.BlockSizes(
            block_q=BLOCK, block_kv=BLOCK, block_kv_compute=COMPUTE, block_q_dkv=BLOCK, block_kv_dkv=BLOCK,
            block_kv_dkv_compute=COMPUTE, block_q_dq=BLOCK, block_kv_dq=BLOCK,
        )  # fmt: skip
        mask = splash.MultiHeadMask([splash.CausalMask((T, T))])
        kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
        heads_first = (x[0].swapaxes(0, 1) for x in (q, k, v))
        return kernel(*heads_first).swapaxes(0, 1)[None]

    call = {"xsa": ours(Projection()), "plain": ours(None), "splash": theirs, "composed": composed}[kind]

    def gradients(q, k, v, dz):
        return jax.vjp(call, q, k, v)[1](dz)

    mesh = Mesh(np.array(topologies.get_topology_desc(topology_name=CHIPS[chip], platform="tpu").devices[:1]), ("data",))
    shape = jax.ShapeDtypeStruct((1, T, 1, E), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(call).trace(*[shape] * 3) if direction == "forward" else jax.jit(gradients).trace(*[shape] * 4)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    cycles = [int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text())]
    print(json.dumps({"fusions": len(cycles), "estimated_cycles": sum(cycles)}))


def compile_and_weigh(chip: str, kind: str, direction: str) -> dict:
    with tempfile.TemporaryDirectory() as dump:
        env = dict(os.environ, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
        env["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        )
        command = [sys.executable, __file__, "--child", chip, kind, direction]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{chip} {kind} {direction}:\n{done.stderr[-3000:]}")
        result = {"around": json.loads(done.stdout.splitlines()[-1])}
        for name, regions in KERNELS.get((kind, direction), {}).items():
            listings = [f for f in glob.glob(f"{dump}/*{name}*final_bundles.txt") if "schedule-analysis" not in f]
            if len(listings) != 1:
                raise SystemExit(f"{name}: expected one listing of final bundles, found {listings}")
            result[name] = weigh(pathlib.Path(listings[0]).read_text(), regions)
        result["weighted"] = sum(part["weighted"] for part in result.values() if "weighted" in part)
        return result


def measure(chip: str, directions: list[str]) -> dict:
    result: dict = {}
    for direction in directions:
        row = {kind: compile_and_weigh(chip, kind, direction) for kind in ("xsa", "plain", "splash")}
        # The two units are near enough for a sum: an estimated cycle issues one bundle, and may wait for memory besides.
        kernels = {kind: part["weighted"] for kind, part in row.items()}
        everything = {kind: part["weighted"] + part["around"]["estimated_cycles"] for kind, part in row.items()}
        for name, cost in (("kernels", kernels), ("everything", everything)):
            row[name] = cost | {f"xsa_over_{other}": round(cost["xsa"] / cost[other], 4) for other in ("plain", "splash")}
        if direction == "forward":
            row["composed"] = compile_and_weigh(chip, "composed", direction)
        result[direction] = row
        print(chip, direction, row["kernels"], row["everything"], row.get("composed", ""), flush=True)
    return result


def grown(stored: dict, chips: list[str], directions: list[str]) -> list[str]:
    """Where our kernels, compiled anew, cost 2% more than stored."""
    cases = [(chip, kind, direction) for chip in chips for direction in directions for kind in ("xsa", "plain")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda case: compile_and_weigh(*case)["weighted"], cases))
    worse = []
    for (chip, kind, direction), now in zip(cases, found, strict=True):
        before = stored[chip][direction]["kernels"][kind]
        print(f"{chip} {direction} {kind}: {now} bundles, {before} stored", flush=True)
        if now > 1.02 * before:
            worse.append(f"{chip} {direction} {kind}: {now} for {before}")
    return worse


def table(chips: dict) -> str:
    """Markdown: ratios of the kernels' weighted bundles, and in parentheses with what XLA adds around them."""
    pairs = [(direction, other) for direction in ("forward", "backward") for other in ("plain", "splash")]
    lines = [
        "| chip | " + " | ".join(f"{direction}, XSA / {other}" for direction, other in pairs) + " |",
        "|---|" + "---|" * len(pairs),
    ]
    for chip, rows in chips.items():
        ratios = [[rows[d][cost]["xsa"] / rows[d][cost][other] for cost in ("kernels", "everything")] for d, other in pairs]
        cells = [f"{kernels:.3f} ({everything:.3f})" for kernels, everything in ratios]
        lines.append(f"| {chip} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--directions", default="forward,backward")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path, help="only compare: fail where our kernels cost 2% more than stored here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    chips, directions = args.chips.split(","), args.directions.split(",")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    if args.check:
        stored = json.loads(args.check.read_text())
        if stored["versions"]["libtpu"] != versions["libtpu"]:
            print(f"not compared: {args.check} was made with libtpu {stored['versions']['libtpu']}, this is {versions['libtpu']}")
        elif worse := grown(stored["chips"], chips, directions):
            raise SystemExit("more than 2% more bundles than stored: " + "; ".join(worse))
        return
    report: dict = {
        "command": "python benchmarks/tpu_bundles.py " + " ".join(sys.argv[1:]),
        "shape": {"T": T, "E": E, "heads": 1, "causal": True, "dtype": "bfloat16", "block": BLOCK, "splash_compute": COMPUTE},
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "chips": {},
    }
    for chip in chips:
        report["chips"][chip] = measure(chip, directions)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    if {"forward", "backward"} <= set(directions):
        print(table(report["chips"]))


if __name__ == "__main__":
    main()
