"""`bench step --against torch`: the same plain decoder in Hugging Face's transformers, trained by PyTorch on a device.

It is given every advantage that it has there: fused AdamW, bfloat16 by autocast over float32 weights (frozen ones in
bfloat16), scaled dot-product attention, rows without documents to keep apart, the faster of eager and compiled, and no
activation is computed twice unless memory runs out otherwise. Adapters are PEFT's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from nash_mhc.config.schema import ConfigError, ModelConfig, RunConfig
from nash_mhc.hub.config_json import family_config, family_of

_PROJECTIONS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}


def _check(cfg: RunConfig) -> None:
    """ConfigError for what there is no such model or no such library for; nothing is imported yet."""
    if not isinstance(cfg.model, ModelConfig) or family_of(cfg.model) is None:
        raise ConfigError(
            "--against torch: transformers has no such model; compare the plain decoder (--model-scales 1 --model-conv-taps 0 "
            "--model-residual plain --model-full-every 0 --model-window none)"
        )
    wanted = ["torch", "transformers", *(["peft"] if cfg.lora.rank else [])]
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"--against torch: {missing[0]} is not installed; pip install {' '.join(missing)}")
    _targets(cfg)


def against_torch(cfg: RunConfig, *, steps: int, warmup: int) -> dict[str, Any]:
    """Theirs, then ours, one after the other on the same device; with the ratio of their speeds."""
    _check(cfg)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    say("torch: eager, then compiled ...")
    # A process of its own gives the device's memory back before ours begins.
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        theirs = pool.submit(_measure, cfg, steps, warmup).result()
    say(f"torch: {theirs['tokens_per_s']:,.0f} tokens/s ({theirs['form']}); ours: compiling ...")
    from nash_mhc.bench.step import bench_step  # after theirs: JAX takes most of a GPU's memory

    ours = bench_step(cfg, steps=steps, warmup=warmup)
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    return ours | {f"torch_{name}": value for name, value in theirs.items()} | {
        "torch_mfu": ours["mfu"] and ours["mfu"] / ratio, "ours_over_torch": ratio,
    }  # fmt: skip


def _targets(cfg: RunConfig) -> list[str]:
    every = [name for names in _PROJECTIONS.values() for name in names]
    named = cfg.lora.targets.split(",") if cfg.lora.targets not in _PROJECTIONS else _PROJECTIONS[cfg.lora.targets]
    found = every if cfg.lora.targets == "all" else [name.strip() for name in named]
    if unknown := [name for name in found if name not in every]:
        raise ConfigError(
            f"--against torch: --lora-targets {unknown[0]} is no module's name there; there are {', '.join(every)}"
        )
    return found


def _model(cfg: RunConfig, device: Any) -> Any:
    import torch
    import transformers

    assert isinstance(cfg.model, ModelConfig)
    values = family_config(cfg.model, str(family_of(cfg.model)), cfg.data.seq_len)
    # A tied table is one there, too: that ours enters times a factor is nothing to its speed.
    config = transformers.AutoConfig.for_model(**values | {"tie_word_embeddings": cfg.model.tied_embeddings})
    with device:
        torch.manual_seed(cfg.train.seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if cfg.lora.rank:
        import peft

        lora = cfg.lora
        settings: dict[str, Any] = {
            "r": lora.rank, "lora_alpha": 2 * lora.rank if lora.alpha is None else lora.alpha, "lora_dropout": lora.dropout,
            "target_modules": _targets(cfg), "use_rslora": lora.rslora, "task_type": "CAUSAL_LM",
        }  # fmt: skip
        model = peft.get_peft_model(model.to(getattr(torch, lora.base_dtype)), peft.LoraConfig(**settings))
    return model.train()


def _measure(cfg: RunConfig, steps: int, warmup: int) -> dict[str, Any]:
    """The faster of eager and compiled, each without recomputation if that fits."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tried: dict[str, Any] = {}
    best: dict[str, Any] = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        try:
            figures = _fitting(cfg, device, compiled, steps, warmup)
        except Exception as error:  # its compiler has many ways to fail, and needs another compiler on the machine
            if not compiled:
                raise
            figures = None
            print(f"torch: cannot be compiled here ({type(error).__name__}); eager stands", file=sys.stderr, flush=True)
        tried[f"{name}_tokens_per_s"] = figures and figures["tokens_per_s"]
        if figures and figures["tokens_per_s"] > best.get("tokens_per_s", 0.0):
            best = figures | {"form": name}
    if not best:
        raise ConfigError("--against torch: it runs out of memory even when it computes activations twice; a smaller batch")
    return best | tried | {"version": torch.__version__}


def _fitting(cfg: RunConfig, device: Any, compiled: bool, steps: int, warmup: int) -> dict[str, Any] | None:
    import torch

    for recompute in (False, True):
        with contextlib.suppress(torch.OutOfMemoryError):
            return _timed(cfg, device, compiled, recompute, steps, warmup)
        torch.cuda.empty_cache()
    return None


def _batch(cfg: RunConfig, device: Any) -> Any:
    import torch

    shape = (cfg.data.batch_size, cfg.data.seq_len)
    return torch.from_numpy(np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape)).to(device)


def _losses(cfg: RunConfig, model: Any, device: Any) -> Iterator[Any]:
    """Training, a step an item: the loss that it had, still on the device."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    o = cfg.optim
    optimizer = torch.optim.AdamW(
        trained, lr=o.learning_rate, betas=(o.b1, o.b2), weight_decay=o.weight_decay, fused=True
    )  # fmt: skip
    tokens_BT = _batch(cfg, device)
    while True:
        losses = []
        for _ in range(cfg.train.grad_accum):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss / cfg.train.grad_accum
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, o.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield sum(losses)


def _timed(cfg: RunConfig, device: Any, compiled: bool, recompute: bool, steps: int, warmup: int) -> dict[str, Any]:
    import torch

    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = _model(cfg, device)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        model = torch.compile(model)
    # As in ours: the host reads a step's loss while the next one runs, and times are between such ends.
    ends, losses, before = [], [], None
    for loss in itertools.islice(_losses(cfg, model, device), max(warmup, 1) + steps + 1):
        if before is not None:
            losses.append(float(before))
            ends.append(time.perf_counter())
        before = loss
    seconds = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends[-steps - 1 :]))
    tokens = cfg.train.grad_accum * cfg.data.batch_size * cfg.data.seq_len
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "recomputes": recompute,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
