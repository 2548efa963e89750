"""AdamW with clipping and a warm-up schedule, from the configuration."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from nash_mhc.config.schema import RunConfig
from nash_mhc.parallel.sharding import decays

Schedule = Callable[[Int[Array, ""] | int], Float[Array, ""]]


def learning_rate(cfg: RunConfig) -> Schedule:
    """Learning rate of update number `count` (from 0): the peak at the end of the warm-up, the least at the last step."""
    optim, total = cfg.optim, cfg.train.total_steps
    peak, floor = optim.learning_rate, optim.learning_rate * optim.min_lr_ratio
    warmup = optim.warmup_steps
    decay_start = max(warmup, round(total * (1 - optim.decay_fraction)))

    def at(count: Int[Array, ""] | int) -> Float[Array, ""]:
        done = jnp.asarray(count, jnp.float32) + 1  # updates made once this one is
        share = jnp.clip((done - warmup) / max(total - warmup, 1), 0, 1)
        if optim.schedule == "cosine":
            after = floor + (peak - floor) * 0.5 * (1 + jnp.cos(jnp.pi * share))
        elif optim.schedule == "wsd":
            after = peak + (floor - peak) * jnp.clip((done - decay_start) / max(total - decay_start, 1), 0, 1)
        else:
            after = jnp.full((), peak)
        return jnp.where(done < warmup, peak * done / max(warmup, 1), after)

    return at


def make_optimizer(cfg: RunConfig, model: PyTree) -> optax.GradientTransformation:
    """Clip by global norm, AdamW with float32 moments, decay on matrices only."""
    optim = cfg.optim
    clip = optax.clip_by_global_norm(optim.max_grad_norm) if optim.max_grad_norm else optax.identity()
    return optax.chain(
        clip,
        optax.scale_by_adam(optim.b1, optim.b2, optim.eps),
        optax.add_decayed_weights(optim.weight_decay, mask=decays(model)),
        optax.scale_by_learning_rate(learning_rate(cfg)),
    )
