"""Evaluates a checkpoint: python eval.py --run runs/x [--step N] [--contexts 512,4096] [--samples 3 --prompt "The "]

Prints the validation loss by position and by context length, the similarity analysis, and samples. Writes them as JSON to
runs/x/eval/<step>.json, and a plot of the similarity analysis to runs/x/eval/<step>.png.
"""

import pathlib
import sys

from absl import app, flags

from xsa_jax.errors import UserError

RUN = flags.DEFINE_string("run", None, "Folder of a training run.", required=True)
STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; the latest by default.", lower_bound=1)
CONTEXTS = flags.DEFINE_list("contexts", [], "More context lengths to evaluate, besides the trained one: 512,4096.")
STORE = flags.DEFINE_string("store", None, "Folder of the token store to evaluate on; the store of the run by default.")
TOKENS = flags.DEFINE_integer("tokens", None, "Number of held-out tokens to read; the run's eval.tokens by default.", lower_bound=1)
PROBE_ROWS = flags.DEFINE_integer("probe_rows", 8, "Number of held-out rows for the similarity analysis.", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 1, "Number of texts to generate.", lower_bound=0)
PROMPT = flags.DEFINE_string("prompt", "The", "Text that every sample continues.")
SAMPLE_TOKENS = flags.DEFINE_integer("sample_tokens", None, "Number of tokens per sample; up to 200 by default.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Sampling temperature; 0 takes the most likely token.", lower_bound=0.0)
TOP_K = flags.DEFINE_integer("top_k", 0, "Number of most likely tokens to sample among; 0 = all.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Random seed for sampling.", lower_bound=0)
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, where jax detects no cluster.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes; 1 turns the detection off.", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
OUTPUT = flags.DEFINE_string("output", None, "Path of the JSON file; RUN/eval/<step>.json by default.")


def main(argv: list[str]) -> None:
    """Evaluates the checkpoint that the flags name."""
    if len(argv) > 1:
        sys.exit(f"error: unexpected arguments {argv[1:]}; lists are set as --contexts=512,4096")
    try:
        evaluate()
    except UserError as error:
        sys.exit(f"error: {error}")


def evaluate() -> None:
    """Evaluates the checkpoint, prints the result, and writes it with its plot.

    Raises:
      UserError: a flag, the run, the checkpoint or the token store cannot be used, or the result cannot be written.
    """
    if OUTPUT.value and not OUTPUT.value.endswith(".json"):
        raise UserError(f"--output={OUTPUT.value}: expected a name that ends in .json; the plot goes beside it as .png")
    from xsa_jax.parallel import distributed  # imported once the flags are valid: these imports take seconds
    from xsa_jax.parallel.lifeline import Lifeline
    from xsa_jax.parallel.process import prepare_process

    prepare_process()
    distributed.start(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    with Lifeline():
        distributed.only_first_prints()
        measure()


def measure() -> None:
    """What `evaluate` does once this process has joined the others."""
    import jax

    from xsa_jax.compare import plots
    from xsa_jax.evaluate import generate, loss, report
    from xsa_jax.evaluate.restore import restore
    from xsa_jax.evaluate.similarity import similarity

    contexts = report.contexts(CONTEXTS.value)
    restored = restore(pathlib.Path(RUN.value), STEP.value, STORE.value)
    trained_context = restored.config.data.seq_len
    tokens = TOKENS.value or restored.config.eval.tokens
    probe_batch = next(restored.held_out(trained_context, PROBE_ROWS.value, PROBE_ROWS.value).iterate())
    samples = generate.samples(
        restored, PROMPT.value, SAMPLES.value, SAMPLE_TOKENS.value, TEMPERATURE.value, TOP_K.value, SEED.value
    )
    result = report.header(RUN.value, restored) | {
        "losses": loss.losses(restored, [trained_context, *contexts], tokens),
        "similarity": similarity(restored.model, restored.params, probe_batch),
        "samples": samples,
    }
    if jax.process_index():
        return  # process 0 writes
    output = pathlib.Path(OUTPUT.value or f"{RUN.value}/eval/{restored.step}.json")
    plot = output.with_suffix(".png")
    report.write(result, output)
    plots.similarity({RUN.value: result["similarity"]}, plot)
    print(f"{report.text(result)}\n\nwritten: {output} and {plot}")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags by absl. An invalid flag ends the program with one line."""
    try:
        # Log errors only: Orbax warns of a damaged checkpoint in many lines, before the one line of our error.
        return flags.FLAGS([argv[0], "--verbosity=-2", *argv[1:]])
    except flags.Error as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
