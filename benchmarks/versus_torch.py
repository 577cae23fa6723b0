"""The training step on this machine's CPU, ours against the same decoder written plainly in PyTorch.

    pip install torch                      # in the environment of this repository; nothing else needs it
    python benchmarks/versus_torch.py --out benchmarks/results/cpu_versus_torch.json

Each contender is a process of its own with the same weights and the same random tokens. The losses of their first `PROOF_STEPS`
steps must agree to 1e-4: that proves that the work is the same. The contenders take turns, step by step, and the ratio is the
median over the last pairs, with its quartiles. Float32, AdamW on the same schedule, clipped gradients. `eager` is PyTorch as it is
written, `compiled` is torch.compile where a C++ compiler is at hand. `XSA / SA` is the ratio within one contender.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# layers, width, heads, head width, vocabulary, tokens of a batch
SHAPES = {
    "demo": (4, 128, 4, 32, 260, 1024),
    "1M": (4, 128, 4, 32, 1024, 2048),
    "3M": (6, 192, 6, 32, 2048, 2048),
    "10M": (6, 384, 6, 64, 4096, 2048),
}
PROOF_STEPS = 20
WARMUP = 3
PAUSE = 0.05  # seconds before each step, because PyTorch's threads go on spinning for some time after theirs


def config_of(shape: str, seq_len: int, kind: str) -> Any:
    """Our config of one shape; every contender takes its numbers from here."""
    from xsa_jax.config import Config, from_config_dict, to_dict

    layers, width, heads, head_dim, vocabulary, tokens = SHAPES[shape]
    tree = to_dict(Config())
    tree["model"] |= {"num_layers": layers, "d_model": width, "d_ff": 4 * width, "vocab_size": vocabulary, "dtype": "float32"}
    tree["attention"] |= {"kind": kind, "num_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
    tree["data"] |= {"seq_len": seq_len, "batch_size": max(1, tokens // seq_len)}
    tree["optim"] |= {"peak_lr": 1e-3, "warmup_steps": 10}
    tree["train"] |= {"num_steps": 1000, "loss_chunk_tokens": tokens}
    return from_config_dict(tree)


def batches(config: Any) -> list[np.ndarray]:
    """A few batches of random tokens, int32 [B, T+1], which are read over and over."""
    rng = np.random.default_rng(0)
    shape = config.data.batch_size, config.data.seq_len + 1
    return [rng.integers(0, config.model.vocab_size, shape, dtype=np.int32) for _ in range(4)]


def ours(config: Any, weights: str, forward: bool) -> Callable[[int], float]:
    """(step number) -> loss, by this repository's step. Writes the initial weights where they are not there yet."""
    import jax

    from xsa_jax.parallel.mesh import put_batch
    from xsa_jax.parallel.process import prepare_process
    from xsa_jax.train.loss import loss_sums
    from xsa_jax.train.setup import assemble

    prepare_process()
    setup = assemble(config, jax.devices()[:1])
    state = setup.init_state()
    if not os.path.exists(weights):
        leaves = jax.tree_util.tree_leaves_with_path(state.params)
        np.savez(weights, **{jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves})
    rows = [put_batch(setup.mesh, {"tokens": batch}) for batch in batches(config)]
    if forward:
        model, chunk = setup.model, config.train.loss_chunk_tokens
        program = jax.jit(lambda params, batch: loss_sums(model.bind(params), batch, chunk).nll)
        count = config.data.batch_size * config.data.seq_len
        return lambda n: float(program(state.params, rows[n % len(rows)])) / count

    def step(n: int) -> float:
        nonlocal state
        with jax.set_mesh(setup.mesh):
            state, metrics = setup.step(state, rows[n % len(rows)])
        return float(metrics["loss"])

    return step


def theirs(config: Any, weights: str, forward: bool, compiled: bool) -> Callable[[int], float]:
    """The same by PyTorch."""
    import torch
    from torch.nn import functional as F

    model, attention, optim = config.model, config.attention, config.optim
    stored = np.load(weights)
    params = {name: torch.nn.Parameter(torch.tensor(stored[name])) for name in stored.files}
    T, E, eps = config.data.seq_len, attention.head_dim, 1e-6
    frequency = attention.rope_theta ** (-torch.arange(0, E, 2, dtype=torch.float32) / E)
    angle = torch.arange(T, dtype=torch.float32)[:, None] * frequency
    cos, sin = torch.cos(angle), torch.sin(angle)  # [T, E/2], for [B, H, T, E]

    def norm(x: Any, scale: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], scale, None, eps)

    def rotate(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(x: Any, p: Callable[[str], Any]) -> Any:
        B, D = x.shape[0], model.d_model
        q, k, v = (
            F.linear(x, p(f"attention.{name}").reshape(D, -1).T).view(B, T, attention.num_heads, E).transpose(1, 2)
            for name in "qkv"
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        if attention.kind == "xsa":
            y = y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp_min(attention.xsa.eps) * v
        return F.linear(y.transpose(1, 2).reshape(B, T, -1), p("attention.out").reshape(-1, D).T)

    def loss_of(tokens: Any) -> Any:
        x = norm(F.embedding(tokens[:, :-1], params["embed"]), params["embed_norm.scale"])
        for layer in range(model.num_layers):

            def p(name: str, layer: int = layer) -> Any:
                return params[f"blocks.{name}"][layer]

            x = x + attend(norm(x, p("attention_norm.scale")), p)
            h = F.gelu(F.linear(norm(x, p("mlp_norm.scale")), p("mlp.up").T), approximate="tanh")
            x = x + F.linear(h, p("mlp.down").T)
        logits = F.linear(norm(x, params["final_norm.scale"]), params["embed"])
        return F.cross_entropy(logits.reshape(-1, model.vocab_size), tokens[:, 1:].reshape(-1))

    program = torch.compile(loss_of) if compiled else loss_of
    rows = [torch.tensor(batch, dtype=torch.long) for batch in batches(config)]
    if forward:

        def evaluate(n: int) -> float:
            with torch.no_grad():
                return float(program(rows[n % len(rows)]))

        return evaluate
    decayed = [p for name, p in params.items() if p.ndim - name.startswith("blocks.") >= 2]
    others = [p for name, p in params.items() if p.ndim - name.startswith("blocks.") < 2]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=optim.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)

    def step(n: int) -> float:
        loss = program(rows[n % len(rows)])
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(params.values()), optim.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(optim, config.train.num_steps, n)
        adamw.step()
        return float(loss.detach())

    return step


def learning_rate(optim: Any, num_steps: int, n: int) -> float:
    """The rate of update n (from 0): linear warm-up, then cosine; see `xsa_jax.train.optim`."""
    first = optim.peak_lr / (optim.warmup_steps + 1)
    if n < optim.warmup_steps:
        return first + (optim.peak_lr - first) * n / optim.warmup_steps
    progress = (n - optim.warmup_steps) / (num_steps - optim.warmup_steps)
    cosine = 0.5 * (1 + np.cos(np.pi * min(progress, 1.0)))
    return optim.peak_lr * ((1 - optim.final_lr_ratio) * cosine + optim.final_lr_ratio)


def worker(pipe: Any, contender: str, kind: str, shape: str, seq_len: int, forward: bool, weights: str) -> None:
    """Answers each step number, and first of all without being asked step 0, with (seconds, loss, peak memory in MB)."""
    import resource

    config = config_of(shape, seq_len, kind)
    try:
        step = ours(config, weights, forward) if contender == "ours" else theirs(config, weights, forward, contender == "compiled")
        n: int | None = 0
        while n is not None:
            start = time.perf_counter()
            loss = step(n)
            seconds = time.perf_counter() - start
            pipe.send((seconds, loss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
            n = pipe.recv()
    except Exception as error:  # no compiler, or no memory: the table says so
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")


class Contender:
    """One process, which starts by compiling and making step 0, and makes a step whenever it is told to."""

    def __init__(self, *arguments: Any):
        self._pipe, other = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=worker, args=(other, *arguments), daemon=True)
        self._process.start()
        self.error: str | None = None
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.memory = 0.0

    def tell(self, n: int) -> None:
        """Makes the process take step `n`, unless it has failed."""
        if self.error is None:
            self._pipe.send(n)

    def answer(self) -> None:
        """Waits for the end of the step."""
        if self.error is not None:
            return
        answer = self._pipe.recv()
        if isinstance(answer, str):
            self.error = answer
            return
        seconds, loss, self.memory = answer
        self.seconds.append(seconds)
        self.losses.append(loss)

    def close(self) -> None:
        """Ends the process."""
        if self.error is None:
            self._pipe.send(None)
        self._process.join()


def measure(shape: str, seq_len: int, forward: bool, contenders: list[str], pairs: int) -> list[dict[str, Any]]:
    """One row for each contender and kind."""
    with tempfile.TemporaryDirectory() as folder:
        started: dict[tuple[str, str], Contender] = {}
        for name in contenders:
            for kind in ("sa", "xsa"):
                started[name, kind] = Contender(name, kind, shape, seq_len, forward, f"{folder}/{kind}.npz")
            if name == "ours":  # they write the weights that the others read
                for contender in started.values():
                    contender.answer()
        for (name, _), contender in started.items():
            if name != "ours":
                contender.answer()
        for n in range(1, max(PROOF_STEPS, WARMUP + pairs)):
            for contender in started.values():
                time.sleep(PAUSE)
                contender.tell(n)
                contender.answer()
        for contender in started.values():
            contender.close()
    rows = []
    for (name, kind), contender in started.items():
        row = {"shape": shape, "T": seq_len, "pass": "forward" if forward else "step", "kind": kind, "contender": name}
        if contender.error is not None:
            rows.append(row | {"failed": contender.error})
            continue
        proof = PROOF_STEPS if not forward else 4
        apart = max(abs(a - b) for a, b in zip(contender.losses[:proof], started["ours", kind].losses[:proof], strict=True))
        if apart > 1e-4:
            raise SystemExit(f"{row}: its losses are {apart:.2e} from ours, expected at most 1e-4: it does other work")
        mine, base, plain = (started[key].seconds[-pairs:] for key in ((name, kind), ("ours", kind), (name, "sa")))
        ratios = [theirs / ours for theirs, ours in zip(mine, base, strict=True)]
        rows.append(row | {
            "ms": 1e3 * statistics.median(mine), "loss apart": apart, "peak MB": contender.memory,
            "ours / it, tokens/s": statistics.median(ratios), "quartiles": [float(x) for x in np.percentile(ratios, [25, 75])],
            "XSA / SA": statistics.median(a / b for a, b in zip(mine, plain, strict=True)),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each shape, length, pass and other contender: our tokens per second over its own, and XSA / SA of both."""
    cells = {(row["shape"], row["T"], row["pass"], row["contender"], row["kind"]): row for row in rows if "failed" not in row}
    lines = []
    for shape, length, which, contender in dict.fromkeys(key[:4] for key in cells if key[3] != "ours"):
        if any((shape, length, which, contender, kind) not in cells for kind in ("sa", "xsa")):
            continue  # one of the two failed; the long table says why
        sa, xsa = (cells[shape, length, which, contender, kind] for kind in ("sa", "xsa"))
        line: dict[str, Any] = {"shape": shape, "T": length, "pass": which, "ours over": contender}
        for kind, row in (("SA", sa), ("XSA", xsa)):
            low, high = row["quartiles"]
            line[kind] = f"{row['ours / it, tokens/s']:.2f} ({low:.2f} to {high:.2f})"
        line |= {"XSA / SA, ours": cells[shape, length, which, "ours", "xsa"]["XSA / SA"], "XSA / SA, its": xsa["XSA / SA"]}
        lines.append(line)
    return lines


def main() -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names, default=list(SHAPES))
    parser.add_argument("--lengths", type=names, default=["64", "256", "1024"])
    parser.add_argument("--contenders", type=names, default=["ours", "eager", "compiled"], help="ours comes first; eager, compiled")
    parser.add_argument("--passes", type=names, default=["step", "forward"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out")
    args = parser.parse_args()

    from benchmarks import _record

    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        for length in map(int, args.lengths):
            for which in args.passes:
                rows += measure(shape, length, which == "forward", args.contenders, args.pairs)
                _record.write(args.out, "versus_torch", rows)
    shown = ["shape", "T", "pass", "kind", "contender", "ms", "ours / it, tokens/s", "XSA / SA", "peak MB", "failed"]
    print(_record.table(rows, shown))
    print(_record.table(summary(rows), ["shape", "T", "pass", "ours over", "SA", "XSA", "XSA / SA, ours", "XSA / SA, its"]))
    print(json.dumps({"threads": os.cpu_count()}))


if __name__ == "__main__":
    main()
