"""Makes a token store from text files.

    python -m xsa_jax.data.prepare --input 'fineweb/*.parquet' --tokenizer gpt2 --output tokens/
    python -m xsa_jax.data.prepare --verify --output tokens/

Worker processes convert one input file at a time. Each finished file is recorded, so the same command continues after any
interruption. The store does not depend on the number of workers.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xsa_jax.data import pool, store, text, tokenizer
from xsa_jax.data.convert import Job, Settings, file_hash, token_dtype
from xsa_jax.data.progress import Progress
from xsa_jax.data.shard import EOTS_PER_DOCUMENT
from xsa_jax.errors import UserError
from xsa_jax.files import write_bytes, write_json, write_text


def prepare(inputs: Sequence[str], output: str | os.PathLike[str], settings: Settings, workers: int = 1) -> dict[str, Any]:
    """Makes a token store, or continues an unfinished one. A finished store stays as it is. Returns the store's meta.

    Args:
      inputs: paths and globs of text files.
      output: folder of the store.
      settings: settings of the store.
      workers: number of worker processes; with 1 this process does the work.

    Raises:
      UserError: an input or a setting is unusable, the folder holds a store of other inputs or settings, another process writes
        into the folder, or a text is broken and `settings.on_error` is "fail".
    """
    if not 0 <= settings.validation_fraction <= 1:
        raise UserError(f"--validation-fraction {settings.validation_fraction}: expected a number from 0 to 1")
    if workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    folder = Path(output)
    paths = text.expand(inputs)
    encoder = tokenizer.load(settings.tokenizer)
    plan = _plan(paths, encoder, settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made ({error}); expected a folder, new or begun by this command") from error
    with _locked(folder):
        if (folder / store.META).exists():
            meta = store.read_meta(folder)
            _check_same_plan(folder, "finished", _plan_from_meta(meta), plan, paths)
            shutil.rmtree(folder / store.WORK, ignore_errors=True)
            return meta
        work = _begin(folder, plan, paths)
        jobs = [Job(index, path, folder, settings) for index, path in enumerate(paths)]
        _run(jobs, work, workers)
        return _finish(folder, jobs, plan, encoder)


def _plan(paths: Sequence[Path], encoder: tokenizer.Tokenizer, settings: Settings) -> dict[str, Any]:
    inputs = [{"name": path.name, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns} for path in paths]
    return {
        "format": store.FORMAT,
        "tokenizer": {"name": encoder.name, "fingerprint": encoder.fingerprint},
        "eot": settings.eot,
        "validation_fraction": settings.validation_fraction,
        "on_error": settings.on_error,
        "inputs": inputs,
    }


def _plan_from_meta(meta: dict[str, Any]) -> dict[str, Any]:
    made = meta["made"]
    return {
        "format": meta["format"],
        "tokenizer": {key: meta["tokenizer"][key] for key in ("name", "fingerprint")},
        "eot": meta["eot"],
        **{key: made[key] for key in ("validation_fraction", "on_error", "inputs")},
    }


def _check_same_plan(folder: Path, state: str, old: dict[str, Any], new: dict[str, Any], paths: Sequence[Path]) -> None:
    # Files that were converted under "fail" had no broken document, so "skip" would have written the same shards.
    may_differ = {"on_error"} if new["on_error"] == "skip" else set()
    fields = [key for key in new if key != "inputs" and key not in may_differ]
    changes = [f"{key} was {old.get(key)!r}, now {new[key]!r}" for key in fields if old.get(key) != new[key]]
    was, now = old["inputs"], new["inputs"]
    if [entry["name"] for entry in was] != [entry["name"] for entry in now]:
        changes.append(f"the list of inputs had {_listing(was)}, now {_listing(now)}")
    else:
        changes += [
            f"input {a['name']} changed (it had {_size_and_time(a)}, now {_size_and_time(b)})"
            for a, b, path in zip(was, now, paths, strict=True)
            if not _same_input(a, b, path)
        ]
    if changes:
        raise UserError(
            f"{folder} holds a {state} store made otherwise: {'; '.join(changes)}. "
            "Use the same command as before, or another --output (or delete the folder)"
        )


def _same_input(was: dict[str, Any], now: dict[str, Any], path: Path) -> bool:
    # A file is read again only if its modification time changed.
    return was["size"] == now["size"] and (was["mtime_ns"] == now["mtime_ns"] or was.get("hash") == file_hash(path))


def _listing(entries: Sequence[dict[str, Any]]) -> str:
    names = [entry["name"] for entry in entries]
    return f"{len(names)} files ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _size_and_time(entry: dict[str, Any]) -> str:
    return f"{entry['size']} bytes of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry['mtime_ns'] / 1e9))}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The kernel releases the lock when its holder dies, whatever the cause.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"{folder}: another prepare is writing here; wait for it or use another --output") from None
    finally:
        os.close(descriptor)


def _begin(folder: Path, plan: dict[str, Any], paths: Sequence[Path]) -> Path:
    """Creates the work folder of a preparation, or checks that the existing one may be continued. Returns the work folder."""
    work = folder / store.WORK
    file = work / "plan.json"
    if file.exists():
        old = json.loads(file.read_text(encoding="utf-8"))
        for index, (was, now) in enumerate(zip(old["inputs"], plan["inputs"], strict=False)):
            if _record_path(work, index).exists():
                was["hash"] = _read_record(work, index)["hash"]
            elif was["name"] == now["name"]:
                was.update(now)  # an input that was not converted yet may have changed
        _check_same_plan(folder, "half-made", old, plan, paths)
    else:
        other_files = sorted(path.name for path in folder.iterdir() if path.name != store.WORK)
        if other_files:
            raise UserError(f"--output {folder}: not empty (it has {', '.join(other_files[:5])}); expected a new folder")
        work.mkdir(exist_ok=True)
    write_json(file, plan)
    for leftover in folder.rglob("*.tmp"):
        leftover.unlink()
    return work


def _record_path(work: Path, index: int) -> Path:
    return work / f"{index:05}.json"


def _read_record(work: Path, index: int) -> dict[str, Any]:
    return json.loads(_record_path(work, index).read_text(encoding="utf-8"))


def _run(jobs: Sequence[Job], work: Path, workers: int) -> None:
    pending = [job for job in jobs if not _record_path(work, job.index).exists()]
    total, left = (sum(job.path.stat().st_size for job in subset) for subset in (jobs, pending))
    progress = Progress(total, total - left)
    with contextlib.closing(progress):
        for job, result in pool.run(pending, progress, workers):
            write_json(_record_path(work, job.index), result)


def _finish(folder: Path, jobs: Sequence[Job], plan: dict[str, Any], encoder: tokenizer.Tokenizer) -> dict[str, Any]:
    work = folder / store.WORK
    results = [_read_record(work, job.index) for job in jobs]
    splits = {
        name: shards
        for name in ("train", "validation")
        if (shards := [result["shards"][name] for result in results if name in result["shards"]])
    }
    skipped: Counter[str] = Counter()
    for result in results:
        skipped.update(result["skipped"])
    if not splits:
        raise UserError(f"--input: no document in {_listing(plan['inputs'])}; skipped: {dict(skipped) or 'none'}")
    skipped_lines = [line for result in results for line in result["named"]]
    if skipped_lines:
        write_text(folder / "skipped.txt", "".join(f"{line}\n" for line in skipped_lines))
    if isinstance(encoder, tokenizer.JsonFile):
        write_bytes(folder / "tokenizer.json", encoder.json)
    tokenizer_meta = {key: getattr(encoder, key) for key in ("name", "fingerprint", "vocab_size", "eot_id")}
    made = {
        "validation_fraction": plan["validation_fraction"],
        "on_error": plan["on_error"],
        "inputs": [entry | {"hash": result["hash"]} for entry, result in zip(plan["inputs"], results, strict=True)],
        "skipped": dict(sorted(skipped.items())),
    }
    meta = store.write_meta(folder, tokenizer_meta, token_dtype(encoder.vocab_size).name, plan["eot"], splits, made)
    shutil.rmtree(work)
    return meta


def summary(meta: dict[str, Any]) -> str:
    """A text table of the splits of a store, with its skipped documents and its tokenizer."""
    rows = [f"{'split':<12}{'documents':>14}{'tokens':>18}{'bytes':>18}{'bytes/token':>13}"]
    for name, split in meta["splits"].items():
        ratio = split["bytes"] / split["tokens"]
        rows.append(f"{name:<12}{split['documents']:>14,}{split['tokens']:>18,}{split['bytes']:>18,}{ratio:>13.3f}")
    rows += [f"skipped {reason:<20}{count:>14,}" for reason, count in meta["made"]["skipped"].items()]
    rows.append(f"tokenizer {meta['tokenizer']['name']}, {meta['dtype']}, end of text: {meta['eot']}, hash {meta['hash']}")
    return "\n".join(rows)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m xsa_jax.data.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--input", nargs="+", action="extend", help=f"paths or quoted globs of files in {' '.join(text.SUFFIXES)}")
    parser.add_argument("--tokenizer", help="gpt2, bytes, or the path of a JSON file of the tokenizers library")
    parser.add_argument("--output", required=True, help="folder of the store")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.005, help="share of held-out documents, selected by hash (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="number of processes (one per core)")
    parser.add_argument("--on-error", choices=("fail", "skip"), default="fail", help="treatment of broken documents (%(default)s)")
    parser.add_argument("--eot", choices=tuple(EOTS_PER_DOCUMENT), default="end", help="place of end-of-text tokens (%(default)s)")
    parser.add_argument("--verify", action="store_true", help="check the hashes of the store in --output; takes no --input")
    args = parser.parse_args(argv)
    if args.verify == bool(args.input) or args.verify == bool(args.tokenizer):
        parser.error("expected --input and --tokenizer to make a store, or --verify alone to check one")
    return args


def _verify(output: str) -> int:
    opened = store.TokenStore.open(output)
    opened.verify()
    print(f"{summary(opened.meta)}\n{output}: OK, every shard holds what was written")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    args = _arguments(argv)
    try:
        if args.verify:
            return _verify(args.output)
        settings = Settings(args.tokenizer, args.validation_fraction, args.eot, args.on_error)
        meta = prepare(args.input, args.output, settings, args.workers)
    except UserError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, or one that cannot be read or written
        print(f"prepare: {args.output}: {error}; run the same command again once this is mended", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nprepare: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    print(summary(meta))
    if args.validation_fraction > 0 and "validation" not in meta["splits"]:
        print("prepare: WARNING: no document fell into the validation split; use a larger --validation-fraction", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
