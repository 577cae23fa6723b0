"""The learning-rate schedule and the optimiser, built with optax."""

from typing import Any

import jax
import optax

from xsa_jax.config import OptimConfig


def schedule(config: OptimConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up to `peak_lr`, then cosine decay to `final_lr_ratio * peak_lr` at `num_steps`, or constant.

    Update i = 1, ..., w of the w = `warmup_steps` uses i / (w + 1) of the peak, as in NanoGPT. The first rate is thus not 0.
    """
    peak, warmup_steps = config.peak_lr, config.warmup_steps
    first = peak / (warmup_steps + 1)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup_steps, num_steps, end_value=config.final_lr_ratio * peak)
    warmup = optax.linear_schedule(first, peak, warmup_steps)
    return optax.join_schedules([warmup, optax.constant_schedule(peak)], [warmup_steps])


def optimizer(config: OptimConfig, num_steps: int, axes: dict[str, Any]) -> optax.GradientTransformation:
    """Clipping of the global norm, then AdamW with decoupled weight decay on matrices.

    Args:
      config: the `optim` group of the run's config.
      num_steps: number of updates in the schedule.
      axes: logical axes of each parameter. A parameter with at most one axis besides the layer axis is a norm scale, gate or sink,
        and is not decayed.
    """

    def decayed(_params) -> Any:
        return jax.tree.map(
            lambda names: sum(name != "layers" for name in names) >= 2, axes, is_leaf=lambda x: isinstance(x, tuple)
        )

    adamw = optax.adamw(
        schedule(config, num_steps), config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=decayed
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw
