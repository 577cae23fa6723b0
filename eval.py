"""Evaluates a checkpoint: python eval.py --run runs/x [--step N] [--contexts 512,4096] [--samples 3 --prompt "The "]

Prints validation loss (by position, and at other contexts), the similarity analysis and samples; writes them as JSON to
runs/x/eval/<step>.json, and a picture of the similarity beside it as <step>.png.
"""

import pathlib
import sys

from absl import app, flags

from xsa_jax.errors import UserError

RUN = flags.DEFINE_string("run", None, "Folder of a training run.", required=True)
STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; the latest by default.", lower_bound=1)
CONTEXTS = flags.DEFINE_list("contexts", [], "Context lengths to evaluate beside the trained one: 512,4096.")
STORE = flags.DEFINE_string("store", None, "Token store to evaluate on; the run's own by default.")
TOKENS = flags.DEFINE_integer("tokens", None, "Number of held-out tokens to read; the run's eval.tokens by default.", lower_bound=1)
PROBE_ROWS = flags.DEFINE_integer("probe_rows", 8, "Number of held-out rows for the similarity analysis.", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 1, "Number of texts to generate.", lower_bound=0)
PROMPT = flags.DEFINE_string("prompt", "The", "Text that every sample continues.")
SAMPLE_TOKENS = flags.DEFINE_integer("sample_tokens", None, "Tokens to generate per sample; up to 200 by default.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Sampling temperature; 0 takes the most likely token.", lower_bound=0.0)
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k most likely tokens; 0 = among all.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Random seed for sampling.", lower_bound=0)
OUTPUT = flags.DEFINE_string("output", None, "Path of the JSON file; RUN/eval/<step>.json by default.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"error: unexpected arguments {argv[1:]}; lists are set as --contexts=512,4096")
    try:
        evaluate()
    except UserError as error:
        sys.exit(f"error: {error}")


def evaluate() -> None:
    if OUTPUT.value and not OUTPUT.value.endswith(".json"):
        raise UserError(f"--output={OUTPUT.value}: expected a name that ends in .json; the picture goes beside it as .png")
    from xsa_jax.compare import plots  # after the flags are known to be good: these imports bring up jax
    from xsa_jax.evaluate import generate, loss, report
    from xsa_jax.evaluate.restore import restore
    from xsa_jax.evaluate.similarity import similarity

    contexts = report.contexts(CONTEXTS.value)
    restored = restore(pathlib.Path(RUN.value), STEP.value, STORE.value)
    trained = restored.config.data.seq_len
    tokens = TOKENS.value or restored.config.eval.tokens
    probe = next(restored.held_out(trained, PROBE_ROWS.value, PROBE_ROWS.value).iterate())
    samples = generate.samples(
        restored, PROMPT.value, SAMPLES.value, SAMPLE_TOKENS.value, TEMPERATURE.value, TOP_K.value, SEED.value
    )
    result = report.header(RUN.value, restored) | {
        "losses": loss.losses(restored, [trained, *contexts], tokens),
        "similarity": similarity(restored.model, restored.params, probe),
        "samples": samples,
    }
    output = pathlib.Path(OUTPUT.value or f"{RUN.value}/eval/{restored.step}.json")
    picture = output.with_suffix(".png")
    report.write(result, output)
    plots.similarity({RUN.value: result["similarity"]}, picture)
    print(f"{report.text(result)}\n\nwritten: {output} and {picture}")


def parse_flags(argv: list[str]) -> list[str]:
    """Absl's parser, with one line in place of its paragraph."""
    try:
        # Errors only: Orbax warns of a damaged checkpoint in many lines, ahead of the one line that our own error takes.
        return flags.FLAGS([argv[0], "--verbosity=-2", *argv[1:]])
    except flags.Error as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
