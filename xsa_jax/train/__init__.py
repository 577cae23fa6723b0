"""Training: loss, optimiser, state, step, checkpoints, metrics, and the loop that connects them."""
