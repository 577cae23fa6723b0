"""The plans of the paper's three sizes on five sets of devices: memory, bytes on the wire and predicted step of the compiled step.

    python benchmarks/plans.py --out benchmarks/results/plans.json
    python benchmarks/plans.py --check benchmarks/results/plans.json --cases 0p7b@v5e:4x4,0p7b@v5e:16x16
    python benchmarks/plans.py --table benchmarks/results/plans.json

`make plan-table` does the first and writes the table into docs/pods.md; `make gates` does the second, which fails where a number is
more than 3% above the stored one. The first takes some minutes for each case. Needs what `make plan` installs.
"""

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

REPO = pathlib.Path(__file__).resolve().parents[1]
SIZES = ("0p7b", "1p3b", "2p7b")
TOPOLOGIES = ("v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v6e:8x8", "h200:8")
# XSA on all, and SA where the whole steps are compared.
CASES = [f"{size}@{topology}" for size in SIZES for topology in TOPOLOGIES]
CASES += ["0p7b@v5e:4x4@sa", "0p7b@v5e:16x16@sa", "1p3b@v5p:4x4x4@sa", "1p3b@v6e:8x8@sa"]
SLACK = 1.03
PAGE, BEGIN, END = REPO / "docs" / "pods.md", "<!-- table by make plan-table -->", "<!-- end of table -->"


def planned(case: str) -> dict:
    """The plan of "size@topology" or "size@topology@sa", or the reason why there is none."""
    size, topology, *kind = case.split("@")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "plan.json"
        command = [sys.executable, "-m", "xsa_jax.plan", f"--config=configs/paper.py:{size}", f"--topology={topology}"]
        command += [f"--config.attention.kind={kind[0] if kind else 'xsa'}", f"--json={path}"]
        env = os.environ | {"PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'kernels'}"}
        done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
        found = (
            json.loads(path.read_text()) if path.exists() else {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        )
        return found | {"date": datetime.date.today().isoformat(), "versions": _versions()}


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def plans(cases: list[str]) -> Iterator[tuple[str, dict]]:
    """The plans of these cases in their order, made two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for case, plan in zip(cases, pool.map(planned, cases), strict=True):
            print(case, plan.get("error") or f"{1e3 * plan['step']:.1f} ms, MFU {100 * plan['mfu']:.1f}%", flush=True)
            yield case, plan


def numbers(plan: dict) -> dict[str, float]:
    """What may not grow."""
    wire = {name: sum(c["wire"] for c in plan["collectives"] if c["synchronous"] or name == "wire") for name in ("wire", "waited")}
    return {"memory": plan["memory"]["needed"], "cycles": sum(plan["cycles"].values()), "step": plan["step"], **wire}


def worse(found: dict, stored: dict | None) -> list[str]:
    """Numbers of one case that are more than the slack above the stored ones."""
    if stored is None:
        return ["no plan is stored; run with --out"]
    if "error" in found or "error" in stored:
        return [] if "error" in found and "error" in stored else [f"{found.get('error')}, stored {stored.get('error')}"]
    before = numbers(stored)
    now = numbers(found)
    return [f"{name} is {now[name]:.4g}, stored {before[name]:.4g}" for name in now if now[name] > SLACK * before[name]]


def table(stored: dict) -> str:
    """The plans as a Markdown table, and the ratio of the whole steps of XSA and SA."""
    head = "config|devices|mesh (data, fsdp, tensor)|remat|GiB needed of|M cycles|GB sent (waited for)|step|MFU|HFU|days"
    rows = ["| " + head.replace("|", " | ") + " |", "|" + "---|" * 11]
    for case, plan in stored["plans"].items():
        size, topology, *kind = case.split("@")
        if "error" in plan:
            rows.append(f"| {size} | {topology} | {plan['error'].removeprefix('error: ')} |" + " |" * 8)
            continue
        found = numbers(plan)
        cells = [
            size + (" SA" if kind else ""), topology, ", ".join(str(n) for n in plan["mesh"].values()), plan["remat"],
            f"{found['memory'] / 2**30:.1f} of {plan['available'] / 2**30:.1f}",
            f"{found['cycles'] / 1e6:,.0f}" if found["cycles"] else "-",
            f"{found['wire'] / 1e9:.2f} ({found['waited'] / 1e9:.2f})", f"{1e3 * plan['step']:,.1f} ms",
            f"{100 * plan['mfu']:.1f}%", f"{100 * plan['hfu']:.1f}%", f"{plan['num_steps'] * plan['step'] / 86400:.2f}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    sound = {case for case, plan in stored["plans"].items() if "error" not in plan}
    pairs = [(case, case + "@sa") for case in stored["plans"] if {case, case + "@sa"} <= sound]
    ratios = [f"{case} {stored['plans'][case]['step'] / stored['plans'][sa]['step']:.4f}" for case, sa in pairs]
    made = sorted({f"{plan['versions']}, {plan['date']}" for plan in stored["plans"].values()})
    absent = [case for case in CASES if case not in stored["plans"]]
    notes = [f"Step of XSA over that of SA: {'; '.join(ratios)}.", ""] if ratios else []
    notes += [f"Not planned yet: {', '.join(absent)}.", ""] if absent else []
    return "\n".join([*rows, "", *notes, f"{'; '.join(made)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="file to store the plans in, beside those of other cases")
    parser.add_argument("--check", type=pathlib.Path, help="file with stored plans to compare with")
    parser.add_argument("--table", type=pathlib.Path, help="file with stored plans to write into docs/pods.md")
    parser.add_argument("--cases", default=",".join(CASES), help="size@topology[@sa], separated by commas")
    args = parser.parse_args()
    cases = args.cases.split(",")
    if args.out:
        known = json.loads(args.out.read_text())["plans"] if args.out.exists() else {}
        for case, plan in plans(cases):
            known[case] = plan
            ordered = {case: known[case] for case in CASES if case in known}
            args.out.write_text(json.dumps({"plans": ordered}, indent=1) + "\n")
    if args.check:
        stored = json.loads(args.check.read_text())["plans"]
        problems = [f"{case}: {line}" for case, plan in plans(cases) for line in worse(plan, stored.get(case))]
        if problems:
            raise SystemExit("\n".join(problems))
        print(f"{len(cases)} plans need at most {100 * (SLACK - 1):.0f}% more than the stored ones")
    if args.table:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table(json.loads(args.table.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    main()
