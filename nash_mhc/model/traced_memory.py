"""Estimate a layer's activation memory on one device from a trace of the layer itself.

The layer and its backward pass are traced once as one device runs them, without a device or a compiler. The remat
policy decides which forward values are saved. Peak memory follows from one rule: matrix products, loops and reductions
write their results to memory, and everything between them is fused. tests/estimate/test_plan_memory.py compares the
result with XLA's own figures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from nash_mhc.config.model import LayerKind
from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.captures import recording
from nash_mhc.model.layer import Layer, residual_class
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.model.parts import ValueEmbedding, of_tokens
from nash_mhc.model.protocol import Activations, Execution
from nash_mhc.model.remat import remat_policy
from nash_mhc.ops.attend import PLAIN_KERNELS, SHAPES_ONLY
from nash_mhc.parallel.sharding import for_compute, one_device

_HEALTH = ("game", "streams")
# Allocated bytes of a backward pass over the bytes of its live values, fitted to XLA's buffers on CPU and GPU.
_FRAGMENTATION = 1.3
_PASSES = 4.5  # bytes moved in all over bytes written by the forward pass, fitted to measured steps
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call"}
# Operations whose operands and results are in memory. Reductions only write their results; operands may be fused.
_IN_MEMORY = {
    "dot_general", "ragged_dot", "conv_general_dilated", "scan", "while", "cond", "gather", "sort", "optimization_barrier",
    "pallas_call", "custom_vjp_call", "scatter", "scatter-add", "dynamic_update_slice", "cumsum", "cumlogsumexp", "cummax",
}  # fmt: skip
_REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"}


class _Value(NamedTuple):
    number: int
    shape: tuple[int, ...]
    bytes: int


class _Operation(NamedTuple):
    equation: Any
    inputs: tuple[_Value, ...]
    outputs: tuple[_Value, ...]


class _Program(NamedTuple):
    """Operations in order, with inner functions inlined."""

    inputs: tuple[_Value, ...]
    operations: tuple[_Operation, ...]
    outputs: tuple[_Value, ...]


def _inlined(closed: ClosedJaxpr) -> _Program:
    count = 0
    operations: list[_Operation] = []

    def value(aval: Any) -> _Value:
        nonlocal count
        count += 1
        size = math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
        return _Value(count, tuple(getattr(aval, "shape", ())), int(size))

    def inline(jaxpr: Jaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        known = dict(zip(jaxpr.invars, arguments, strict=True)) | {var: value(var.aval) for var in jaxpr.constvars}
        read = lambda var: value(var.aval)._replace(bytes=0) if isinstance(var, Literal) else known[var]
        for equation in jaxpr.eqns:
            inputs = [read(var) for var in equation.invars]
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if equation.primitive.name in _CALLS and inner is not None:
                outputs = inline(getattr(inner, "jaxpr", inner), inputs)
            else:
                outputs = [value(var.aval) for var in equation.outvars]
                operations.append(_Operation(equation, tuple(inputs), tuple(outputs)))
            known |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    inputs = [value(var.aval) for var in closed.jaxpr.invars]
    outputs = inline(closed.jaxpr, inputs)
    return _Program(tuple(inputs), tuple(operations), tuple(outputs))


class _Trace(NamedTuple):
    """One layer and one sequence. The first inputs of `backward` are the last outputs of `forward`."""

    forward: _Program
    states: int  # number of arrays of the residual state: the first inputs and first outputs of `forward`
    backward: _Program  # its last inputs are gradients of the output state, its first outputs those of the input state


def trace_layer(run: Callable[[Any, Any], tuple[Any, Any]], state: Any, layer: Any) -> _Trace:
    """Trace run(state, layer) -> (output state, other outputs) and its backward pass, for one sequence."""

    def forward(state: Any, layer: Any) -> Any:
        after, backward, _ = jax.vjp(run, state, layer, has_aux=True)
        return after, backward

    forward_jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(state, layer)
    gradient = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), shapes[0])
    backward_jaxpr = jax.make_jaxpr(lambda vjp, gradient: vjp(gradient))(shapes[1], gradient)
    return _Trace(_inlined(forward_jaxpr), len(jax.tree.leaves(state)), _inlined(backward_jaxpr))


@functools.lru_cache(64)
def _trace(cfg: ModelConfig, kind: LayerKind, dtype: str, kernel: str, seq_len: int, tp: int) -> _Trace:
    layout = attention_layout((1, seq_len), jnp.ones((1, seq_len), jnp.int32), cfg.strides, "xla")

    def run(state: Any, weights: Any) -> Any:
        layer, embedding = weights
        values = of_tokens(embedding, jnp.zeros((1, seq_len), jnp.int32))
        with recording(_HEALTH) as captured:
            layer = for_compute(layer, jnp.dtype(dtype))
            after = layer(state, layout, window=kind.window, kernel=kernel, values=values)
        return after, captured

    with one_device(seq_len, tp):
        state = jax.eval_shape(
            lambda: residual_class(cfg).enter(cfg, jnp.zeros((1, seq_len // tp, cfg.width), jnp.dtype(dtype)))
        )  # fmt: skip
        layer = jax.eval_shape(lambda: Layer.init(cfg, kind, key=jax.random.key(0)))
        embedding = jax.eval_shape(lambda: ValueEmbedding.init(cfg, key=jax.random.key(0))) if kind.values else None
        return trace_layer(run, state, (layer, embedding))


def _dependents(program: _Program, on: Sequence[_Value]) -> set[int]:
    """Return the numbers of these values and of all that depend on them."""
    numbers = {value.number for value in on}
    for operation in program.operations:
        if any(value.number in numbers for value in operation.inputs):
            numbers.update(value.number for value in operation.outputs)
    return numbers


def _saved_and_recomputed(
    program: _Program, needed: Sequence[_Value], policy: Callable[..., Any]
) -> tuple[list[_Value], list[_Operation]]:
    """Return (values that the policy saves for the backward pass, operations that are recomputed)."""
    saves = {
        value.number
        for op in program.operations
        if policy(op.equation.primitive, *(var.aval for var in op.equation.invars), **op.equation.params)
        for value in op.outputs
    }
    named = set(saves)  # saved values and their aliases
    for op in program.operations:
        if op.equation.primitive.name in ("name", "reduce_precision") and op.inputs[0].number in named:
            named.add(op.outputs[0].number)
    wanted, saved, recomputed = {value.number: value for value in needed}, [], []
    for operation in reversed(program.operations):
        outputs = [wanted.pop(value.number) for value in operation.outputs if value.number in wanted]
        # With tp, a device saves only its own share of the time axis of a matmul's result.
        is_share = operation.equation.primitive.name == "slice" and operation.inputs[0].number in named
        if not outputs:
            continue
        if is_share or outputs[0].number in saves:
            saved += outputs
        else:
            recomputed.append(operation)
            wanted |= {value.number: value for value in operation.inputs}
    return saved, recomputed[::-1]


def _peak(program: _Program, free: set[int], entered: set[int]) -> tuple[float, float]:
    """Return (peak bytes of live values, bytes written), ignoring the values in `free`.

    Inputs in `entered` are live from the start. Others are copied out of a stack of layers when first used.
    """
    held: dict[int, set[int]] = {}  # value -> the values in memory from which it is computed
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    last: dict[int, int] = {}

    def write(value: _Value, at: int) -> None:
        held[value.number], born[value.number], last[value.number] = {value.number}, at, at
        size[value.number] = 0 if value.number in free else value.bytes

    def touch(value: _Value, at: int) -> set[int]:
        each = held.setdefault(value.number, set())
        for number in each:
            last[number] = at
        return each

    first: dict[int, int] = {}
    for at, operation in reversed(list(enumerate(program.operations, 1))):
        first |= {value.number: at for value in operation.inputs}
    for value in program.inputs:
        write(value, 0 if value.number in entered else first.get(value.number, 0))
    defined: dict[int, int] = {}
    for at, operation in enumerate(program.operations, 1):
        name = operation.equation.primitive.name
        if name in _IN_MEMORY:
            for value in operation.inputs:
                touch(value, at)
                if value.number not in held[value.number] and value.bytes:
                    write(value, at)
        if name in _IN_MEMORY or name in _REDUCES:
            for value in operation.inputs:
                touch(value, at)
            for value in operation.outputs:
                write(value, at)
            continue
        sources = set().union(*(held.get(value.number, set()) for value in operation.inputs))
        for value in operation.outputs:
            held[value.number] = set(sources)
            defined[value.number] = at
    end = len(program.operations) + 1
    for value in program.outputs:
        if value.number not in held.get(value.number, ()):
            at = defined.get(value.number, end)
            touch(value, at)
            write(value, at)
        last[value.number] = end
    change = [0] * (end + 2)
    for number, bytes_ in size.items():
        change[born[number]] += bytes_
        change[last[number] + 1] -= bytes_
    total, most = 0, 0
    for step in change:
        total += step
        most = max(most, total)
    return float(most), float(sum(size.values()))


class LayerBytes(NamedTuple):
    streams: float
    saved: float
    forward: float
    backward: float
    moved: float


@functools.lru_cache(1024)
def _layer_bytes(cfg: ModelConfig, kind: LayerKind, execution: Execution, seq_len: int, tp: int) -> LayerBytes:
    kernel = execution.attention if execution.attention in PLAIN_KERNELS else SHAPES_ONLY
    return layer_bytes(_trace(cfg, kind, execution.dtype, kernel, seq_len, tp), execution.remat)


def layer_bytes(trace: _Trace, remat: str) -> LayerBytes:
    """Return the bytes of one layer and one sequence under this remat policy."""
    ahead, back, states = trace.forward, trace.backward, trace.states
    state, weights, after = ahead.inputs[:states], ahead.inputs[states:], ahead.outputs[:states]
    needed = ahead.outputs[states:]
    on_state = _dependents(ahead, state)
    saved, recomputed = _saved_and_recomputed(ahead, needed, remat_policy(remat))
    own = {value.number: value for value in saved if value.number in on_state}
    inputs = {value.number for value in ahead.inputs}
    entered = {value.number for value in state}
    # Weights, their casts, and what depends on them alone count elsewhere.
    not_on_state = {value.number for op in ahead.operations for value in op.outputs} - on_state
    forward, _ = _peak(ahead._replace(outputs=(*after, *own.values())), inputs | not_on_state | set(own), entered)
    _, written = _peak(ahead._replace(outputs=after), inputs | not_on_state, entered)
    # Join the recomputed operations and the backward pass into one program, with consistent numbers.
    renamed = dict(zip((value.number for value in back.inputs), needed, strict=False))
    shift = 1 + max(value.number for op in ahead.operations for value in op.outputs)
    name = lambda value: renamed.get(value.number, value._replace(number=value.number + shift))
    rename = lambda op: _Operation(op.equation, tuple(map(name, op.inputs)), tuple(map(name, op.outputs)))
    gradients = tuple(map(name, back.inputs[len(needed) :]))
    outputs = tuple(map(name, back.outputs))
    both = _Program((*ahead.inputs, *saved, *gradients), (*recomputed, *map(rename, back.operations)), outputs[:states])
    shapes = {tuple(sorted(value.shape)) for value in weights}
    to_state = _ancestors_of_outputs(both)
    weight_gradients = {
        value.number
        for op in both.operations
        for value in op.outputs
        if value.number not in to_state and tuple(sorted(value.shape)) in shapes
    }
    free = {value.number for value in weights} | weight_gradients | not_on_state
    backward, _ = _peak(both, free, {value.number for value in gradients})
    streams, saved_bytes = sum(v.bytes for v in state), sum(v.bytes for v in own.values())
    return LayerBytes(float(streams), float(saved_bytes), forward, _FRAGMENTATION * backward, written)


def _ancestors_of_outputs(program: _Program) -> set[int]:
    """Return the numbers of all values that the program's outputs depend on."""
    numbers = {value.number for value in program.outputs}
    for operation in reversed(program.operations):
        if any(value.number in numbers for value in operation.outputs):
            numbers.update(value.number for value in operation.inputs)
    return numbers


def activations(cfg: ModelConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """Return the bytes of `rows` sequences on one device.

    `tp` splits heads, ffn and, between layers, the time axis.
    """
    seq_len += -seq_len % cfg.coarsest_stride
    local = dataclasses.replace(
        cfg, heads=cfg.heads // tp, kv_heads=cfg.kv_heads // tp, ffn=cfg.ffn // tp, layers=len(cfg.group)
    )  # fmt: skip
    execution = Execution(execution.dtype, execution.remat, execution.attention)
    group = [_layer_bytes(local, kind, execution, seq_len, tp) for kind in cfg.group]
    times = rows * (cfg.layers // len(cfg.group))
    return Activations(
        streams=times * sum(layer.streams for layer in group),
        saved=times * sum(layer.saved for layer in group),
        forward=rows * max(layer.forward for layer in group),
        backward=rows * max(layer.backward for layer in group),
        gathered=0.0,
        moved=times * _PASSES * sum(layer.moved for layer in group),
    )
