"""Compares runs that differ in attention alone.

    python -m xsa_jax.compare runs/sa runs/xsa --output runs/report

The command reads the files that train.py and eval.py wrote. It prints a table, and writes it as table.md and table.json together
with three plots. Every other run is compared with the first.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from xsa_jax.compare.comparison import compare
from xsa_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m xsa_jax.compare", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of runs; the others are compared with the first")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="folder for the table and the plots")
    parser.add_argument("--allow", nargs="+", default=[], metavar="FIELD", help="more fields or groups that may differ: seed optim")
    parser.add_argument("--step_times", type=pathlib.Path, metavar="FILE", help="output file of python -m xsa_jax.train.step_time")
    args = parser.parse_args(argv)
    try:
        markdown = compare(args.runs, args.output, args.allow, args.step_times)
    except (UserError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(f"{markdown}\nwritten: {args.output}/table.md, table.json, loss.png, position.png, similarity.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
