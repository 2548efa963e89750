"""Spikes: steps whose objective (what is minimized) or gradient norm stands far above those of the steps before."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

KEPT = 64  # steps that a new one is compared with
MEASURES = {"objective": "training objective", "grad_norm": "gradient norm"}  # name among the metrics -> in words
_NORMAL = 1.4826  # a normal distribution's standard deviation in units of its median absolute deviation
# Of the median: where values hardly vary, a hair's breadth is no spike. Gradient norms have a long tail, single batches
# of several times the median are ordinary, and clipping takes care of them.
_LEAST_SPREAD = {"objective": 0.02, "grad_norm": 0.25}


class Recent(eqx.Module):
    """The last finite values of each measure, in a ring. Part of the state:
    a resumed run judges as the unbroken one does."""

    values_MN: Float[Array, "M N"]
    count: Int[Array, ""]  # finite values seen so far: the next one goes to count mod N
    spikes: Int[Array, ""]  # over the whole run

    @staticmethod
    def empty() -> Recent:
        return Recent(jnp.zeros((len(MEASURES), KEPT)), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def _median(values_MN: Float[Array, "M N"]) -> Float[Array, " M"]:
    ordered_MN, half = jnp.sort(values_MN, axis=1), KEPT // 2
    return (ordered_MN[:, half - 1] + ordered_MN[:, half]) / 2


def scores(recent: Recent, values_M: Float[Array, " M"]) -> Float[Array, " M"]:
    """How far each value lies above the median of the last ones, in robust standard deviations; below it: 0.

    0, too, until the ring is full: the first steps of a run fall too fast to say what is usual.
    """
    # Both measures in one array: two sorts of a few numbers are all that this costs a step.
    median_M = _median(recent.values_MN)
    spread_M = _NORMAL * _median(jnp.abs(recent.values_MN - median_M[:, None]))
    least_M = jnp.array([_LEAST_SPREAD[name] for name in MEASURES]) * jnp.abs(median_M)
    spread_M = jnp.maximum(spread_M, least_M) + 1e-6  # for values that are all 0
    usable = jnp.isfinite(values_M).all() & (recent.count >= KEPT)
    return jnp.where(usable, jnp.maximum((values_M - median_M) / spread_M, 0.0), 0.0)


def remember(recent: Recent, values_M: Float[Array, " M"], spike: Bool[Array, ""]) -> Recent:
    """With these values in the ring, unless one of them is not finite.

    A spike enters as well: a few of them do not move a median, and a real change of level is what is usual after half a
    ring; were it kept out, every step after it would be a spike for ever.
    """
    finite = jnp.isfinite(values_M).all()
    values_MN = recent.values_MN.at[:, recent.count % KEPT].set(values_M)
    return Recent(jnp.where(finite, values_MN, recent.values_MN), recent.count + finite, recent.spikes + spike)


def line(step: int, metrics: dict[str, Any], skipped_in_a_row: int) -> str | None:
    """The line about a step that was skipped or was a spike; None about an ordinary one."""
    update = f"its update was skipped ({skipped_in_a_row} in a row)" if skipped_in_a_row else "its update was taken"
    if metrics["empty"]:
        return f"step {step}: none of its tokens counts in the loss; it changes nothing"
    if metrics["spike"]:
        measure = max(MEASURES, key=lambda name: metrics[f"spike_score/{name}"])
        score = metrics[f"spike_score/{measure}"]
        return f"step {step}: {MEASURES[measure]} {metrics[measure]:.4g} is a spike, score {score:.1f}; {update}"
    return f"step {step}: loss or gradients are not finite; {update}" if skipped_in_a_row else None
