"""From a config to a trained run: loss, optimiser, state, step, checkpoints, metrics, and the loop that ties them."""
