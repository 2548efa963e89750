"""Spikes: steps whose objective (the quantity that is minimized) or gradient norm is far above the recent median."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WINDOW = 64  # recent steps that a new one is compared with
MEASURES = {"objective": "training objective", "grad_norm": "gradient norm"}  # name in the metrics -> name in messages
_NORMAL = 1.4826  # a normal distribution's standard deviation in units of its median absolute deviation
# Smallest spread as a share of the median: if values hardly vary, a tiny increase is not a spike. Gradient norms have a
# long tail: single batches of several times the median are ordinary, and clipping handles them.
_MIN_SPREAD = {"objective": 0.02, "grad_norm": 0.25}


class Recent(eqx.Module):
    """The last finite values of each measure in a ring buffer; part of the state, so it survives restarts."""

    values_MN: Float[Array, "M N"]
    count: Int[Array, ""]  # finite values seen so far; the next one is written at index count mod N
    spikes: Int[Array, ""]  # in the whole run

    @staticmethod
    def empty() -> Recent:
        return Recent(jnp.zeros((len(MEASURES), WINDOW)), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def _median(values_MN: Float[Array, "M N"]) -> Float[Array, " M"]:
    ordered_MN, half = jnp.sort(values_MN, axis=1), WINDOW // 2
    return (ordered_MN[:, half - 1] + ordered_MN[:, half]) / 2


def scores(recent: Recent, values_M: Float[Array, " M"]) -> Float[Array, " M"]:
    """Return how far each value is above the recent median, in robust standard deviations; 0 if it is below.

    The score is 0 until the ring is full: at the start of a run, losses fall too fast to define a usual level.
    """
    # Both measures are in one array: per step, this costs two sorts of a few numbers.
    median_M = _median(recent.values_MN)
    spread_M = _NORMAL * _median(jnp.abs(recent.values_MN - median_M[:, None]))
    least_M = jnp.array([_MIN_SPREAD[name] for name in MEASURES]) * jnp.abs(median_M)
    spread_M = jnp.maximum(spread_M, least_M) + 1e-6  # for values that are all 0
    usable = jnp.isfinite(values_M).all() & (recent.count >= WINDOW)
    return jnp.where(usable, jnp.maximum((values_M - median_M) / spread_M, 0.0), 0.0)


def remember(recent: Recent, values_M: Float[Array, " M"], spike: Bool[Array, ""]) -> Recent:
    """Return the ring with these values added, unless one of them is not finite.

    Spikes are added, too. A few do not move the median, and after a lasting change of level the new level becomes usual
    within half a ring; without them, every later step would count as a spike.
    """
    finite = jnp.isfinite(values_M).all()
    values_MN = recent.values_MN.at[:, recent.count % WINDOW].set(values_M)
    return Recent(jnp.where(finite, values_MN, recent.values_MN), recent.count + finite, recent.spikes + spike)


def message(step: int, metrics: dict[str, Any], skipped_in_a_row: int) -> str | None:
    """Return the message about a step that was skipped or was a spike; None for an ordinary step."""
    update = f"update skipped ({skipped_in_a_row} in a row)" if skipped_in_a_row else "update applied"
    if metrics["empty"]:
        return f"step {step}: no token of its batch counts in the loss; it changes nothing"
    if metrics["spike"]:
        measure = max(MEASURES, key=lambda name: metrics[f"spike_score/{name}"])
        score = metrics[f"spike_score/{measure}"]
        return f"step {step}: {MEASURES[measure]} {metrics[measure]:.4g} is a spike, score {score:.1f}; {update}"
    return f"step {step}: loss or gradients are not finite; {update}" if skipped_in_a_row else None
