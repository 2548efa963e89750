"""cuDNN's attention as JAX has it and does not export it, and a bug of XLA with its backward pass."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import jax
from jax.extend.mlir import ir

SEEN = ("0.10.2", "0.11.2")  # of jax


def fused() -> Any:
    """Return JAX's module of cuDNN's attention; ImportError without it: ask `is_known` first."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def is_known() -> bool:
    """Return whether this JAX has the primitives; attention takes public kernels otherwise."""
    try:
        return {"_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p"} <= set(vars(fused()))
    except ImportError:
        return False


def walks_documents() -> bool:
    """Return whether cuDNN can attend document by document on the GPU of this process; other kernels run otherwise."""
    try:
        return is_known() and float(jax.local_devices(backend="gpu")[0].compute_capability) >= 9.0
    except (RuntimeError, AttributeError, ValueError):
        return False


def forward(*operands: Any, **settings: Any) -> Any:
    return fused()._dot_product_attention_fwd_p.bind(*operands, **settings)


def backward(*operands: Any, **settings: Any) -> Any:
    return fused()._dot_product_attention_bwd_p.bind(*operands, **settings)


def number_backward_passes(module: Any) -> None:
    """Give each backward pass in a lowered program a seed of its own; nothing is drawn from it.

    Of several equal ones, XLA (jax 0.11.2) makes the first alone deterministic, then looks for the others under a name
    that they do not have: `IndexError: raw_hash_map::at` in the first step. Functions that call them are copied.
    A program without these calls is left as it is.
    """
    with module.context:
        symbols = ir.SymbolTable(module.operation)
        numbers = itertools.count(1)

        @functools.cache
        def has_some(name: str) -> bool:
            return any(_is_backward(op) or ((callee := _callee(op)) and has_some(callee)) for op in _operations(symbols[name]))

        def number(function: Any) -> None:
            for op in _operations(function):
                if _is_backward(op):
                    config = json.loads(op.attributes["backend_config"].value)
                    config["cudnn_fmha_backend_config"]["seed"] = next(numbers)
                    op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
                elif (callee := _callee(op)) and has_some(callee):
                    own = symbols[callee].operation.clone(ir.InsertionPoint(module.body))
                    op.attributes["callee"] = ir.FlatSymbolRefAttr.get(symbols.insert(own).value)
                    number(own)

        number(symbols["main"])


def _operations(op: Any) -> list[Any]:
    """Return all operations within one, at any depth."""
    found = []
    for inner in (one for region in op.operation.regions for block in region for one in block.operations):
        found += [inner.operation, *_operations(inner)]
    return found


def _is_backward(op: Any) -> bool:
    return op.name == "stablehlo.custom_call" and "fmhaSoftmaxBackward" in op.attributes["call_target_name"].value


def _callee(op: Any) -> str | None:
    return op.attributes["callee"].value if op.name == "func.call" else None
