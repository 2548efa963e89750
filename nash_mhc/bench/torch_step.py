"""`bench step --against torch`: train the same dense decoder with transformers and PyTorch on one device.

PyTorch gets its fastest settings: fused AdamW, bfloat16 autocast over float32 weights (frozen ones in bfloat16), SDPA,
sequences without packed documents, the faster of eager and compiled, and no recomputation unless memory runs out.
Adapters are PEFT's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nash_mhc.config.schema import ArchitectureConfig, ConfigError, LoraConfig, ModelConfig, OptimConfig, RunConfig
from nash_mhc.hub.config_json import family_config, family_of

log = logging.getLogger(__name__)
_PROJECTIONS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}


def _check(model: ArchitectureConfig, lora: LoraConfig) -> None:
    """Raise ConfigError if transformers has no such model or a library is missing, without importing them."""
    if not isinstance(model, ModelConfig) or family_of(model) is None:
        raise ConfigError(
            "--against torch: transformers has no such model; use the dense decoder (--model-scales 1 --model-conv-taps 0 "
            "--model-residual plain --model-full-every 0 --model-window none)"
        )
    wanted = ["torch", "transformers", *(["peft"] if lora.rank else [])]
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"--against torch: {missing[0]} is not installed; pip install {' '.join(missing)}")
    _targets(lora)


def against_torch(cfg: RunConfig, *, steps: int, warmup: int) -> dict[str, Any]:
    """Measure PyTorch, then this package, on the same device, and return both and the ratio of their speeds."""
    _check(cfg.model, cfg.lora)
    log.info("torch: eager, then compiled ...")
    # A separate process frees the device's memory before JAX starts.
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        theirs = pool.submit(_measure, cfg, steps, warmup).result()
    log.info(f"torch: {theirs['tokens_per_s']:,.0f} tokens/s ({theirs['form']}); ours: compiling ...")
    from nash_mhc.bench.step import bench_step  # after PyTorch: JAX reserves most of a GPU's memory

    ours = bench_step(cfg, steps=steps, warmup=warmup)
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    return ours | {f"torch_{name}": value for name, value in theirs.items()} | {
        "torch_mfu": ours["mfu"] and ours["mfu"] / ratio, "ours_over_torch": ratio,
    }  # fmt: skip


def _targets(cfg: LoraConfig) -> list[str]:
    known = [name for names in _PROJECTIONS.values() for name in names]
    words = cfg.targets.split(",") if cfg.targets not in _PROJECTIONS else _PROJECTIONS[cfg.targets]
    targets = known if cfg.targets == "all" else [word.strip() for word in words]
    if unknown := [name for name in targets if name not in known]:
        raise ConfigError(f"--against torch: unknown --lora-targets {unknown[0]}; use some of {', '.join(known)}")
    return targets


def _model(shape: ArchitectureConfig, lora: LoraConfig, seq_len: int, seed: int, device: Any) -> Any:
    import torch
    import transformers

    assert isinstance(shape, ModelConfig)
    values = family_config(shape, str(family_of(shape)), seq_len)
    # Our tied embeddings have a factor that transformers lacks, which does not affect the speed.
    config = transformers.AutoConfig.for_model(**values | {"tie_word_embeddings": shape.tied_embeddings})
    with device:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if lora.rank:
        import peft

        settings: dict[str, Any] = {
            "r": lora.rank, "lora_alpha": 2 * lora.rank if lora.alpha is None else lora.alpha, "lora_dropout": lora.dropout,
            "target_modules": _targets(lora), "use_rslora": lora.rslora, "task_type": "CAUSAL_LM",
        }  # fmt: skip
        model = peft.get_peft_model(model.to(getattr(torch, lora.base_dtype)), peft.LoraConfig(**settings))
    return model.train()


def _measure(cfg: RunConfig, steps: int, warmup: int) -> dict[str, Any]:
    """Measure eager and compiled, each without recomputation if that fits, and return the faster one."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (cfg.data.batch_size, cfg.data.seq_len)
    tokens_BT = torch.from_numpy(np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape)).to(device)
    make_model = functools.partial(_model, cfg.model, cfg.lora, cfg.data.seq_len, cfg.train.seed, device)
    timed = functools.partial(_timed, make_model, tokens_BT, cfg.optim, cfg.train.grad_accum, steps, warmup)
    tried: dict[str, Any] = {}
    best: dict[str, Any] = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        try:
            figures = _within_memory(functools.partial(timed, compiled=compiled))
        except Exception as error:  # torch.compile fails in many ways, and needs a C++ compiler
            if not compiled:
                raise
            figures = None
            log.warning(f"torch: torch.compile failed ({type(error).__name__}); using eager")
        tried[f"{name}_tokens_per_s"] = figures and figures["tokens_per_s"]
        if figures and figures["tokens_per_s"] > best.get("tokens_per_s", 0.0):
            best = figures | {"form": name}
    if not best:
        raise ConfigError("--against torch: PyTorch runs out of memory even with recomputation; lower --batch-size")
    return best | tried | {"version": torch.__version__}


def _within_memory(timed: Callable[..., dict[str, Any]]) -> dict[str, Any] | None:
    """Return the figures without recomputation, else with it; None if memory runs out even then."""
    import torch

    for recompute in (False, True):
        with contextlib.suppress(torch.OutOfMemoryError):
            return timed(recompute=recompute)
        torch.cuda.empty_cache()
    return None


def _losses(model: Any, tokens_BT: Any, optim: OptimConfig, grad_accum: int) -> Iterator[Any]:
    """Train, and yield the loss of each step, on the device."""
    import torch

    trained, device = [parameter for parameter in model.parameters() if parameter.requires_grad], tokens_BT.device.type
    optimizer = torch.optim.AdamW(
        trained, lr=optim.learning_rate, betas=(optim.b1, optim.b2), weight_decay=optim.weight_decay, fused=True
    )
    while True:
        losses = []
        for _ in range(grad_accum):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss / grad_accum
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, optim.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield sum(losses)


def _timed(
    make_model: Callable[[], Any],
    tokens_BT: Any,
    optim: OptimConfig,
    grad_accum: int,
    steps: int,
    warmup: int,
    *,
    compiled: bool,
    recompute: bool,
) -> dict[str, Any]:
    import torch

    on_gpu = tokens_BT.device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = make_model()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        model = torch.compile(model)
    # As in bench_step, the host reads the loss of a step while the next one runs. Times are between these reads.
    ends, losses, before = [], [], None
    for loss in itertools.islice(_losses(model, tokens_BT, optim, grad_accum), max(warmup, 1) + steps + 1):
        if before is not None:
            losses.append(float(before))
            ends.append(time.perf_counter())
        before = loss
    seconds = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends[-steps - 1 :]))
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_s": grad_accum * tokens_BT.numel() / seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "recomputes": recompute,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
