"""`bench kernels`: run a real step and compare every GPU kernel with its plain form, on the step's own values.

The model is two layers of the run's model with noise on all weights: initially all streams are equal, and differences
between them would be rounding errors. Without a GPU, Pallas's interpreter runs the same kernels, slowly.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from nash_mhc.bench.step import random_rows, settings_of
from nash_mhc.bench.step_parts import one_group
from nash_mhc.config.schema import ModelConfig, RunConfig
from nash_mhc.data.pack import Rows
from nash_mhc.ops.platform import comparing_kernels
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.train.device_batches import to_device
from nash_mhc.train.inputs import resolve
from nash_mhc.train.state import create_state
from nash_mhc.train.step import make_objective, make_train_step

log = logging.getLogger(__name__)

# Allowed error against the plain form in float32, relative to the largest value: two bfloat16 roundings, and the error
# of long float32 sums. With cancellation it may be larger, up to _TIMES the plain form's own error in the kernel's
# dtypes or under a relative perturbation of _PERTURBATION.
_ALLOWED = {"bfloat16": 2.0**-7, "float32": 1e-5}
_TIMES, _PERTURBATION = 4.0, 1e-6
_NOISE = 0.1
_DOCUMENTS = 7  # at most, per sequence


def bench_kernels(cfg: RunConfig) -> dict[str, Any]:
    if isinstance(cfg.model, ModelConfig):
        cfg = dataclasses.replace(cfg, model=one_group(cfg.model, 2))
    cfg, mesh = resolve(cfg)
    state = create_state(cfg, mesh)
    state = dataclasses.replace(state, model=jax.jit(_with_noise)(state.model))
    rows = random_rows(cfg.data, cfg.train.grad_accum, cfg.model.vocab_size)
    batch = to_device(_with_documents(rows, cfg.model.alignment), mesh)
    step = make_train_step(make_objective(cfg, most_documents=_DOCUMENTS), Training.of(cfg))
    errors: dict[str, list[_Error]] = {}
    log.info("compiling ...")
    # Otherwise XLA may skip roundings, but only in the plain forms.
    options = {"xla_allow_excess_precision": False}
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"), comparing_kernels(_recording(errors)):
        jax.block_until_ready(jax.jit(step, compiler_options=options)(state, batch, Hyperparameters.of(cfg.optim, cfg.train)))
        jax.effects_barrier()
    kernels = [_figures(name, results) for name, results in sorted(errors.items())]
    return settings_of(cfg, mesh) | {
        "interpreted": jax.default_backend() != "gpu",
        "kernels": kernels,
        "wrong": [row["kernel"] for row in kernels if not row["equal"]],
    }


def _with_documents(rows: Rows, unit: int) -> Rows:
    """Divide each sequence into documents of all lengths, which begin anywhere in a kernel's tiles."""
    A, B, T = rows.segments.shape
    blocks = np.random.default_rng(0).integers(1, _DOCUMENTS + 1, (A, B, -(-T // unit)), np.int32)
    return rows._replace(segments=np.repeat(np.sort(blocks, axis=-1), unit, axis=-1)[..., :T])


def _with_noise(model: Any) -> Any:
    leaves, form = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = lambda a, key: a + _NOISE * jax.random.normal(key, a.shape, a.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return jax.tree.unflatten(form, [noisy(a, key) for a, key in zip(leaves, keys, strict=True)])


class _Error(NamedTuple):
    """The errors of one result against the plain form in float32."""

    dtype: str
    kernel: float
    plain: float

    @property
    def is_equal(self) -> bool:
        return self.kernel <= max(_ALLOWED[self.dtype], _TIMES * self.plain)


def _recording(errors: dict[str, list[_Error]]) -> Callable[[str, Callable[..., Any], tuple[Any, ...], Any], None]:
    """Return a callback that records the error of every kernel result while the step runs."""

    def record(name: str, dtypes: list[str], *pairs: Any) -> None:
        errors.setdefault(name, []).extend(_Error(d, *map(float, pair)) for d, pair in zip(dtypes, pairs, strict=True))

    def compare(name: str, plain: Callable[..., Any], operands: tuple[Any, ...], got: Any) -> None:
        wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, operands)
        forms = [plain(*wide), plain(*operands), plain(*jax.tree.map(_perturbed, wide)), got]
        results = list(zip(*map(jax.tree.leaves, forms), strict=True))
        pairs = [(_error(wanted, got), jnp.maximum(*(_error(wanted, p) for p in others))) for wanted, *others, got in results]
        jax.debug.callback(functools.partial(record, name, [str(got.dtype) for *_, got in results]), *pairs)

    return compare


def _perturbed(a: Array) -> Array:
    """Change every value by a tiny relative amount."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a
    return a * (1.0 + _PERTURBATION * jax.random.rademacher(jax.random.key(0), a.shape, a.dtype))


def _error(wanted: Array, got: Array) -> Array:
    """Return the largest difference over the largest finite value. Equal infinities and NaN pairs count as equal."""
    wanted, got = wanted.astype(jnp.float32), got.astype(jnp.float32)
    same = (wanted == got) | (jnp.isnan(wanted) & jnp.isnan(got))
    difference = jnp.abs(jnp.where(same, 0.0, wanted) - jnp.where(same, 0.0, got))
    largest = jnp.max(jnp.where(jnp.isfinite(wanted), jnp.abs(wanted), 0.0))
    worst = jnp.max(jnp.where(jnp.isnan(difference), jnp.inf, difference))
    return worst / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)


def _figures(name: str, results: list[_Error]) -> dict[str, Any]:
    """Return the worst error of a kernel for each dtype."""
    badness = lambda e: (not e.is_equal, e.kernel)
    worst = {dtype: max((e for e in results if e.dtype == dtype), key=badness) for dtype in {e.dtype for e in results}}
    errors = {dtype: {"kernel": e.kernel, "plain": e.plain} for dtype, e in worst.items()}
    return {"kernel": name, "results": len(results), "errors": errors, "equal": all(e.is_equal for e in results)}


def _cells(errors: dict[str, dict[str, float]]) -> list[str]:
    """Return the errors of the kernel and of the plain form, for each dtype."""
    return [" ".join(f"{errors[d][of]:.0e}" for of in ("kernel", "plain")) if d in errors else "" for d in _ALLOWED]


def show(figures: dict[str, Any]) -> None:
    title = ", ".join(figures[key] for key in ("devices", "model_size", "batch", "dtype"))
    table = Table(title=f"largest errors: {title}")
    for column in ("kernel", "bfloat16", "float32", ""):
        table.add_column(column, no_wrap=True)
    for row in figures["kernels"]:
        table.add_row(row["kernel"], *_cells(row["errors"]), "equal" if row["equal"] else "WRONG")
    console = Console()
    console.print(table)
    where = " (in Pallas's interpreter, without a GPU)" if figures["interpreted"] else ""
    verdict = f"wrong: {', '.join(figures['wrong'])}" if figures["wrong"] else "every kernel agrees with its plain form"
    console.print(f"{verdict}{where}", highlight=False)
