"""`bench kernels`: one real step in which every GPU kernel is held against its plain form, on the numbers that it gets.

Two layers of the run's model, with noise on all of its weights: as they start, streams are alike, and what would tell
them apart is rounding. Where there is no GPU, Pallas's interpreter runs the same kernels; that takes a while.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from nash_mhc.bench.parts import one_group
from nash_mhc.bench.step import random_rows
from nash_mhc.config.schema import ModelConfig, RunConfig
from nash_mhc.data.pack import Rows
from nash_mhc.ops.platform import compared
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.mesh import describe
from nash_mhc.train.device_batches import to_device
from nash_mhc.train.devices import resolve
from nash_mhc.train.state import create_state
from nash_mhc.train.step import make_objective, make_train_step

# How far a result may be from that of the plain form in float32, as a share of its largest number: two roundings of
# bfloat16, and what long sums lose in float32. Where little is left of large terms, it may be more, but not much
# farther than the plain form itself, with the numbers that the kernel gets, and with numbers a little different.
_ALLOWED = {"bfloat16": 2.0**-7, "float32": 1e-5}
_TIMES, _LITTLE = 4.0, 1e-6
_NOISE = 0.1
_DOCUMENTS = 7  # in a row, at most


def bench_kernels(cfg: RunConfig) -> dict[str, Any]:
    if isinstance(cfg.model, ModelConfig):
        cfg = one_group(cfg, 2)
    cfg, mesh = resolve(cfg)
    state = create_state(cfg, mesh)
    state = dataclasses.replace(state, model=jax.jit(_with_noise)(state.model))
    batch = to_device(_rows(cfg), mesh)
    step = make_train_step(make_objective(cfg, most_documents=_DOCUMENTS), Training.of(cfg))
    errors: dict[str, list[_Error]] = {}
    # Otherwise a compiler hands on what was to be rounded as it was before, to the plain forms alone.
    options = {"xla_allow_excess_precision": False}
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"), compared(_noting(errors)):
        jax.block_until_ready(jax.jit(step, compiler_options=options)(state, batch, Hyperparameters.of(cfg.optim, cfg.train)))
        jax.effects_barrier()
    kernels = [_row(name, found) for name, found in sorted(errors.items())]
    return {
        "devices": describe(mesh),
        "model_size": cfg.model_size,
        "batch": f"{cfg.train.grad_accum} x {cfg.data.batch_size} x {cfg.data.seq_len}",
        "dtype": cfg.train.dtype,
        "interpreted": jax.default_backend() != "gpu",
        "kernels": kernels,
        "wrong": [row["kernel"] for row in kernels if not row["equal"]],
    }


def _rows(cfg: RunConfig) -> Rows:
    """Random tokens, in documents of all lengths: they begin anywhere in a kernel's tiles."""
    rows, unit = random_rows(cfg, 0), cfg.model.alignment
    A, B, T = rows.segments.shape
    blocks = np.random.default_rng(0).integers(1, _DOCUMENTS + 1, (A, B, -(-T // unit)), np.int32)
    return rows._replace(segments=np.repeat(np.sort(blocks, axis=-1), unit, axis=-1)[..., :T])


def _with_noise(model: Any) -> Any:
    leaves, form = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = lambda a, key: a + _NOISE * jax.random.normal(key, a.shape, a.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return jax.tree.unflatten(form, [noisy(a, key) for a, key in zip(leaves, keys, strict=True)])


class _Error(NamedTuple):
    """Of one result, from what the plain form makes of it in float32."""

    dtype: str
    kernel: float
    plain: float

    @property
    def is_equal(self) -> bool:
        return self.kernel <= max(_ALLOWED[self.dtype], _TIMES * self.plain)


def _noting(errors: dict[str, list[_Error]]) -> Callable[[str, Callable[..., Any], tuple[Any, ...], Any], None]:
    """Writes down, while the step runs, how far each result of a kernel is from the plain form's."""

    def note(name: str, dtypes: list[str], *found: Any) -> None:
        errors.setdefault(name, []).extend(_Error(d, *map(float, pair)) for d, pair in zip(dtypes, found, strict=True))

    def seen(name: str, plain: Callable[..., Any], operands: tuple[Any, ...], got: Any) -> None:
        wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, operands)
        forms = [plain(*wide), plain(*operands), plain(*jax.tree.map(_nudged, wide)), got]
        results = list(zip(*map(jax.tree.leaves, forms), strict=True))
        far = [(_error(wanted, got), jnp.maximum(*(_error(wanted, p) for p in others))) for wanted, *others, got in results]
        jax.debug.callback(functools.partial(note, name, [str(got.dtype) for *_, got in results]), *far)

    return seen


def _nudged(a: Array) -> Array:
    """Every number up or down by next to nothing."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a
    return a * (1.0 + _LITTLE * jax.random.rademacher(jax.random.key(0), a.shape, a.dtype))


def _error(wanted: Array, got: Array) -> Array:
    """The largest difference, over the largest number that is finite. Where both are the same infinity, or no number,
    there is none; where one is, it is infinite."""
    wanted, got = wanted.astype(jnp.float32), got.astype(jnp.float32)
    same = (wanted == got) | (jnp.isnan(wanted) & jnp.isnan(got))
    far = jnp.abs(jnp.where(same, 0.0, wanted) - jnp.where(same, 0.0, got))
    largest = jnp.max(jnp.where(jnp.isfinite(wanted), jnp.abs(wanted), 0.0))
    return jnp.max(jnp.where(jnp.isnan(far), jnp.inf, far)) / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)


def _row(name: str, found: list[_Error]) -> dict[str, Any]:
    """The worst of each dtype."""
    badness = lambda e: (not e.is_equal, e.kernel)
    worst = {dtype: max((e for e in found if e.dtype == dtype), key=badness) for dtype in {e.dtype for e in found}}
    errors = {dtype: {"kernel": e.kernel, "plain": e.plain} for dtype, e in worst.items()}
    return {"kernel": name, "results": len(found), "errors": errors, "equal": all(e.is_equal for e in found)}


def _cells(errors: dict[str, dict[str, float]]) -> list[str]:
    """The kernel's, then the plain form's own."""
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
    where = " (in Pallas's interpreter: there is no GPU)" if figures["interpreted"] else ""
    verdict = f"wrong: {', '.join(figures['wrong'])}" if figures["wrong"] else "every kernel is equal to its plain form"
    console.print(f"{verdict}{where}", highlight=False)
