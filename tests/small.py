"""A configuration small enough to compile in seconds, with every axis divisible by 8, and what the step tests share."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.config.schema import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TelemetryConfig,
    TrainConfig,
)
from nash_mhc.data.pack import Rows
from nash_mhc.model.architectures import WEIGHTS, abstract_model, architecture_of
from nash_mhc.model.lm import LM
from nash_mhc.model.sampling import DecodeState, Sampling, decode_chunk
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.train.callbacks import Meter
from nash_mhc.train.device_batches import abstract_batch, to_device
from nash_mhc.train.state import ProgramKey, TrainState, create_state, initial_state, sharded_abstract_state, state_shardings
from nash_mhc.train.step import compile_train_step

_SIZES = {"vocab_size": 257, "width": 32, "layers": 2, "heads": 8, "kv_heads": 8, "head_dim": 4, "ffn": 64}
MODEL = ModelConfig(
    **_SIZES, scales=1, conv_taps=0, residual="plain"
)  # dense: what is tested with it does not depend on the architecture
# The whole architecture, small: a convolution, three scales, a window, four streams;
# as wide as the invariants of the design are stated for.
NASH = ModelConfig(**_SIZES | {"width": 64, "head_dim": 8}, scales=3, ratio=2, window=8, conv_taps=3, residual="mhc")


def config(**changes: Any) -> RunConfig:
    """The small run; `changes` are section.key values written section__key=value.
    Its matrices learn at 20 times the rate."""
    base = RunConfig(
        model=MODEL,
        data=DataConfig(batch_size=8, seq_len=32),
        optim=OptimConfig(learning_rate=1.5e-4, warmup_steps=2),
        # Not unrolled, as a run resolves `auto` on a CPU: so its step is the one that `train` below has compiled.
        train=TrainConfig(
            total_steps=10, dtype="float32", attention="xla", unroll="no", log_interval=2, eval_interval=0, eval_batches=2
        ),
        telemetry=TelemetryConfig(sample_tokens=0),
    )
    for name, value in changes.items():
        section, key = name.split("__")
        base = dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **{key: value})})
    return base


def nash_config(**changes: Any) -> RunConfig:
    """The same run with the whole architecture.

    At the start all streams are alike, so nothing depends on how they are mixed: those gradients are rounding, which
    Adam would blow up to whole steps, other ones on every mesh. A larger epsilon leaves them as small as they are.
    """
    # Two streams, mixed once a layer, two scales that answer each other once and a window of half a row compile in less
    # than half the time; four of each and three answers are in test_invariants, and in those of the parts.
    model = dataclasses.replace(NASH, streams=2, scales=2, nash_iterations=1, window=16, residual="mhc-layer")
    return dataclasses.replace(config(**{"optim__eps": 1e-4} | changes), model=model)


def mesh_config(cfg: RunConfig, data: int = 1, fsdp: int = 1, tp: int = 1) -> RunConfig:
    return dataclasses.replace(cfg, mesh=MeshConfig(data=data, fsdp=fsdp, tp=tp))


def random_rows(cfg: RunConfig, seed: int, *, parts: int | None = None, batch: int | None = None) -> Rows:
    """Rows of two or three documents with some padding at the end: every mask has something to hide.

    Laid as `data/pack.py` does: documents start at multiples of the coarsest stride,
    the gap before the next weighs nothing.
    """
    rng = np.random.default_rng(seed)
    A, B, T = parts or cfg.train.grad_accum, batch or cfg.data.batch_size, cfg.data.seq_len
    stride = cfg.model.coarsest_stride
    tokens = rng.integers(0, cfg.model.vocab_size, (A, B, T + 1), np.int32)
    blocks = np.sort(rng.integers(1, 4, (A, B, T // stride), np.int32), axis=-1)
    blocks[..., T // stride - rng.integers(1, max(2, T // stride // 4)) :] = 0
    last = np.diff(blocks, axis=-1, append=0) != 0  # the blocks in which documents end, each with some text
    text = np.where(last, rng.integers(1, stride + 1, blocks.shape), stride)
    segments = np.repeat(blocks, stride, axis=-1)
    weights = (segments > 0) & (np.arange(T) % stride < np.repeat(text, stride, axis=-1))
    return Rows(tokens[..., :-1], tokens[..., 1:], segments, weights.astype(np.float32))


def change_batches(change: Callable[[int, Rows], Rows], setattr: Callable[[Any, str, Any], None] = setattr) -> None:
    """Whatever run reads rows from now on reads `change(step, rows)`; `setattr` may be monkeypatch's."""
    module = sys.modules["nash_mhc.train.trainer"]  # the package's own `run` is the function
    read = module.host_batches

    def batches(*args: Any, start_step: int = 0, **options: Any) -> Iterator[Rows]:
        for step, rows in enumerate(read(*args, start_step=start_step, **options), start_step + 1):
            yield change(step, rows)

    setattr(module, "host_batches", batches)


@functools.cache
def _fresh_model(cfg: ModelConfig, seed: int) -> Any:
    """Drawn by one program, whatever is kept beside the weights."""
    return jax.device_get(jax.jit(lambda key: architecture_of(cfg).init(cfg, key=key))(jax.random.key(seed)))


@functools.cache
def _start(cfg: RunConfig, seed: int) -> TrainState:
    if cfg.lora.rank or cfg.of_kits:  # which draw for themselves
        return jax.device_get(create_state(dataclasses.replace(cfg, train=TrainConfig(seed=seed)), make_mesh(cfg.mesh)))
    return jax.device_get(initial_state(ProgramKey.of(cfg), _fresh_model(cfg.model, seed)))


def start(cfg: RunConfig, mesh: Any) -> TrainState:
    """`create_state`, drawn once for all meshes and optimizers: that it draws the same values on every mesh, and those
    of this function, is a test of its own (test_lm)."""
    shaped = ProgramKey.of(cfg).cfg  # without the settings that do not change the weights
    kits = tuple(section for section in cfg.of_kits if section.section in WEIGHTS)
    drawn = RunConfig(model=cfg.model, optim=shaped.optim, lora=cfg.lora, precision=cfg.precision, of_kits=kits)
    return _placed(cfg, mesh, _start(drawn, cfg.train.seed))


def _placed(cfg: RunConfig, mesh: Any, state: TrainState) -> TrainState:
    """A copy: the step is given these buffers to overwrite."""
    return jax.tree.map(lambda a, s: jax.device_put(np.array(a), s), state, state_shardings(ProgramKey.of(cfg), mesh))


def drawn_model(cfg: Any) -> Any:
    """Of any kind, by numpy, which compiles nothing: about as large as it is drawn, with norms that are not all 1."""
    rng = np.random.default_rng(1)

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        mean, size = (1.0, 0.1) if "scale" in name else (0.0, 0.5 if "embed" in name else 0.15)
        return jnp.asarray(mean + size * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_model(cfg))


def generic_model(cfg: ModelConfig) -> LM:
    """Values that nothing was designed for: fresh weights have all streams alike and kernels that are plain means."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        base = 1.0 if "norm" in name or "alpha" in name else 0.0
        return (base + 0.25 * rng.normal(size=leaf.shape)).astype(np.float32)

    made: LM = jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0))))
    return made


def _compiled(cfg: RunConfig) -> tuple[Any, CompiledStep]:
    mesh = make_mesh(cfg.mesh)
    return mesh, compile_train_step(cfg, mesh)


def lowered_text(cfg: RunConfig, mesh: Any) -> str:
    """The program of the step, before it is compiled: what JAX's cache of compiled programs goes by."""
    step = compile_train_step(cfg, mesh)
    shapes = sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh)
    with jax.set_mesh(mesh):
        return step._jit.lower(*shapes, *step._constants).as_text()


def train(cfg: RunConfig, batches: list[Rows], begin: TrainState | None = None) -> tuple[TrainState, list[dict[str, Any]], Any]:
    """Takes a step on each batch, from the start or from where another run was:
    (last state on the host, metrics of each step, the compiled step)."""
    mesh, step = _compiled(cfg)
    state, history = start(cfg, mesh) if begin is None else _placed(cfg, mesh, begin), []
    for rows in batches:
        state, metrics = step(state, to_device(rows, mesh))
        history.append({k: v.tolist() for k, v in jax.device_get(metrics).items()})
    return jax.device_get(state), history, step


def assert_same_run(got: Any, want: Any, *, rtol: float = 1e-4, health: bool = True) -> None:
    """Two results of `train` agree: metrics of every step, parameters, and moments, which hold the gradients."""
    (state, history, _), (want_state, want_history, _) = got, want
    for a, b in zip(history, want_history, strict=True):
        assert set(a) == set(b)
        for name in b:
            if name.startswith("health/"):
                # Some of these are themselves rounding errors, of sums that are 1 by construction.
                if health:
                    np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=3e-6, err_msg=name)
            else:
                np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=1e-7, err_msg=name)
    moments = [s.opt_state[1] for s in (state, want_state)]
    largest = max(np.linalg.norm(b) for b in jax.tree.leaves(moments[1]))
    # A gradient that is nothing but rounding is as large as the others make it.
    for trees, share, rest in (((state.model, want_state.model), 2e-5, 0.0), (moments, 1e-4, 1e-6 * largest)):
        for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
            # By norm: where a gradient is nearly zero, Adam turns rounding into a visible part of one element's step.
            assert np.linalg.norm(a - b) <= share * np.linalg.norm(b) + rest


def small_meter(history, saved=None, **state):
    """A meter that has taken in the metrics of these steps."""
    meter = Meter(
        tokens_per_step=256, flops_per_token=1.0, peak_flops=1.0, **{"step": 0, "updates": 0, "saved": saved or {}} | state
    )
    for number, metrics in enumerate(history, start=1 + state.get("step", 0)):
        meter.add(number, {k: np.asarray(v) for k, v in metrics.items()})
    return meter


def read(model: Any, cache: Any, tokens_BT: jax.Array, count: jax.Array) -> tuple[jax.Array, Any]:
    """(logits of the token after the first `count`, cache), by what generation does with a prompt."""
    rows, room = tokens_BT.shape
    at = DecodeState(jnp.zeros((rows, model.cfg.vocab_size)), cache, None)
    known_B, numbers_B = jnp.full(rows, room), jnp.zeros(rows, jnp.int32)
    _, at = decode_chunk(model, at, tokens_BT, known_B, count, numbers_B, jax.random.key(0), Sampling())
    return at.logits_BV, at.cache
