"""cuDNN attention, which JAX does not export, and a workaround for an XLA bug in its backward pass."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import jax
from jax.extend.mlir import ir

SEEN = ("0.10.2", "0.11.2", "0.12.0")  # of jax
# From 0.12 on, the primitives require a function of the scores.
_NO_FUNCTION = {"score_mod_name": None, "score_mod_jaxpr": None} if jax.__version_info__ >= (0, 12) else {}


def fused() -> Any:
    """Return JAX's module with cuDNN attention; raise ImportError without it, so check `is_available` first."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def is_available() -> bool:
    """Return whether this JAX has the primitives; otherwise attention uses public kernels."""
    try:
        return {"_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p"} <= set(vars(fused()))
    except ImportError:
        return False


def supports_document_masks() -> bool:
    """Return whether cuDNN supports document masks on this GPU; otherwise attention uses other kernels."""
    try:
        return is_available() and float(jax.local_devices(backend="gpu")[0].compute_capability) >= 9.0
    except (RuntimeError, AttributeError, ValueError):
        return False


def forward(*operands: Any, **settings: Any) -> Any:
    return fused()._dot_product_attention_fwd_p.bind(*operands, **settings, **_NO_FUNCTION)


def backward(*operands: Any, **settings: Any) -> Any:
    return fused()._dot_product_attention_bwd_p.bind(*operands, **settings, **_NO_FUNCTION)


def number_backward_passes(module: Any) -> None:
    """Give each backward pass in a lowered program a different (unused) seed, in place.

    With several equal ones, XLA (jax 0.11.2) makes only the first deterministic and then fails to find the others:
    `IndexError: raw_hash_map::at` in the first step. Functions that call them are cloned. Programs without these calls
    are unchanged.
    """
    with module.context:
        symbols = ir.SymbolTable(module.operation)
        numbers = itertools.count(1)

        @functools.cache
        def calls_backward(name: str) -> bool:
            return any(
                _is_backward(op) or ((callee := _callee(op)) and calls_backward(callee)) for op in _operations(symbols[name])
            )

        def number(function: Any) -> None:
            for op in _operations(function):
                if _is_backward(op):
                    config = json.loads(op.attributes["backend_config"].value)
                    config["cudnn_fmha_backend_config"]["seed"] = next(numbers)
                    op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
                elif (callee := _callee(op)) and calls_backward(callee):
                    clone = symbols[callee].operation.clone(ir.InsertionPoint(module.body))
                    op.attributes["callee"] = ir.FlatSymbolRefAttr.get(symbols.insert(clone).value)
                    number(clone)

        number(symbols["main"])


def _operations(op: Any) -> list[Any]:
    """Return all operations inside `op`, at any depth."""
    operations = []
    for inner in (each for region in op.operation.regions for block in region for each in block.operations):
        operations += [inner.operation, *_operations(inner)]
    return operations


def _is_backward(op: Any) -> bool:
    return op.name == "stablehlo.custom_call" and "fmhaSoftmaxBackward" in op.attributes["call_target_name"].value


def _callee(op: Any) -> str | None:
    return op.attributes["callee"].value if op.name == "func.call" else None
