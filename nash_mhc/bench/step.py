"""Time the real train step, and the same decoder in PyTorch (`bench step`); compile for a TPU (`bench compile`)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import itertools
import logging
import math
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from nash_mhc.config.schema import ConfigError, DataConfig, LoraConfig, MeshConfig, ModelConfig, RunConfig
from nash_mhc.data.pack import Rows
from nash_mhc.estimate.candidates import fastest_remat, with_remat
from nash_mhc.estimate.roofline import flops_per_token
from nash_mhc.loading.formats import FORMATS, HUB
from nash_mhc.model.architectures import count_parameters, for_platform
from nash_mhc.parallel.mesh import check_fit, describe, make_mesh
from nash_mhc.runtime.chips import by_kind
from nash_mhc.runtime.hardware import matmul_rate, peak_flops, peak_memory, processors
from nash_mhc.train.device_batches import abstract_batch, to_device
from nash_mhc.train.inputs import resolve
from nash_mhc.train.state import create_state, sharded_abstract_state
from nash_mhc.train.step import compile_train_step

log = logging.getLogger(__name__)
DOCUMENTS = 2  # per sequence


def random_rows(data: DataConfig, grad_accum: int, vocab_size: int) -> Rows:
    """Return a batch of random tokens, with two documents per sequence. The content does not affect the speed."""
    shape = (grad_accum, data.batch_size, data.seq_len)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (*shape[:2], shape[2] + 1), np.int32)
    segments = np.broadcast_to(1 + np.arange(shape[2]) * DOCUMENTS // shape[2], shape).astype(np.int32)
    return Rows(tokens[..., :-1], tokens[..., 1:], segments, np.ones(shape, np.float32))


def settings_of(cfg: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """Return the settings of a resolved run that every benchmark reports."""
    return {
        "devices": describe(mesh),
        "model_size": cfg.model_size,
        "batch": f"{cfg.train.grad_accum} x {cfg.data.batch_size} x {cfg.data.seq_len}",
        "dtype": cfg.train.dtype,
        "attention": cfg.train.attention,
        "remat": cfg.train.kept,
    }


def read_late(losses: Iterator[Any]) -> Iterator[tuple[float, float]]:
    """Yield (loss, time) of each step. As in training, the host reads a loss while the next step runs."""
    before = next(losses)
    for loss in losses:
        yield float(before), time.perf_counter()
        before = loss
    yield float(before), time.perf_counter()


def time_steps(losses: Iterator[Any], steps: int, warmup: int) -> tuple[list[float], list[float]]:
    """Return (seconds of each step after the warm-up, all losses) of a training loop without an end."""
    read, times = zip(*itertools.islice(read_late(losses), max(warmup, 1) + steps), strict=True)
    return [later - earlier for earlier, later in itertools.pairwise(times[-steps - 1 :])], list(read)


def _peak_memory(compiled: Any, mesh: Mesh) -> int | None:
    """Return the peak bytes of one device, from the allocator or else from the compiler's plan."""
    if (seen := peak_memory(mesh)) is not None:
        return seen
    plan = compiled.memory_analysis()
    return None if plan is None else int(plan.argument_size_in_bytes + plan.temp_size_in_bytes)


def bench_step(cfg: RunConfig, *, steps: int, warmup: int, against: str | None = None) -> dict[str, Any]:
    """Return the median step time after the warm-up, and the matmul rate measured in the same run."""
    if steps < 1 or warmup < 0:
        raise ConfigError("--steps must be at least 1 and --warmup at least 0")
    if against == "torch":
        return against_torch(cfg, steps=steps, warmup=warmup)
    cfg, mesh = resolve(cfg)
    device = mesh.devices.flat[0]
    state = create_state(cfg, mesh)
    batch = to_device(random_rows(cfg.data, cfg.train.grad_accum, cfg.model.vocab_size), mesh)
    log.info("compiling ...")
    step_fn = compile_train_step(cfg, mesh, most_documents=DOCUMENTS)
    compiled = step_fn.compile(state, batch)
    rate_before = matmul_rate(cfg.train.dtype, device, seconds=1.0)

    def train() -> Iterator[Any]:
        nonlocal state
        while True:
            state, metrics = step_fn(state, batch)
            yield metrics["loss"]

    times, losses = time_steps(train(), steps, warmup)
    jax.block_until_ready(state)
    # The machine's speed may vary; take the better of two measurements.
    rate = max(rate_before, matmul_rate(cfg.train.dtype, device, seconds=1.0))
    seconds = statistics.median(times)
    tokens = cfg.train.grad_accum * cfg.data.batch_size * cfg.data.seq_len
    flops = flops_per_token(cfg) * tokens
    peak_rate = peak_flops(mesh, cfg.train.dtype, rate)
    return settings_of(cfg, mesh) | {
        "parameters": count_parameters(cfg.model),
        "compile_s": step_fn.seconds,
        "step_ms": seconds * 1e3,
        "step_ms_min": min(times) * 1e3,
        "step_ms_max": max(times) * 1e3,
        "tokens_per_s": tokens / seconds,
        "tflops_per_s": flops / seconds / 1e12,
        "matmul_tflops_per_s": rate * processors(mesh) / 1e12,
        "share_of_matmul": flops / seconds / (rate * processors(mesh)),
        "mfu": None if peak_rate is None else flops / seconds / peak_rate,
        "peak_memory_gib": None if (peak := _peak_memory(compiled, mesh)) is None else peak / 2**30,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "finite": bool(np.isfinite(losses).all()),
    }


# --- an absent TPU ---------------------------------------------------------------------------------------------------

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def without_local_collectives(text: str) -> str:
    """Return a program's text without collectives over single devices, which only XLA's CPU compiler leaves in."""
    return "\n".join(line for line in text.splitlines() if not _is_over_one_device(line))


def _is_over_one_device(line: str) -> bool:
    """Return whether the groups of a collective have one device: `{{0},..}`, or axes of size 1 (from JAX 0.11 on)."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return all(sizes[axis] == "1" for axis in re.findall(r"'(\w+)'", named[2]))
    return re.search(r"replica_groups=\{\{\d+\}", line) is not None


def count_collectives(compiled: Any) -> dict[str, int]:
    """Count the collectives in the program text by kind; one inside a loop counts once."""
    return dict(sorted(Counter(_COLLECTIVE.findall(without_local_collectives(compiled.as_text()))).items()))


def _tpu_mesh(cfg: MeshConfig, topology: str) -> Mesh:
    """Return the mesh of an absent TPU."""
    axes, shape = tuple(cfg.axes), tuple(cfg.axes.values())
    try:
        # A host has four chips, except in a topology of one chip.
        single: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if re.fullmatch(r"[^:]+:1(x1)*", topology) else {}
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **single)
    except Exception as error:  # libtpu raises many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--topology {topology} is not available ({reason}); install libtpu and use a name such as v6e:2x4"
        ) from error
    if math.prod(shape) != len(described.devices):
        chips = len(described.devices)
        raise ConfigError(
            f"--topology {topology} has {chips} chips, but the mesh has {math.prod(shape)}; set the --mesh flags to match"
        )
    mesh = topologies.make_mesh(described, shape, axes)
    return type(mesh)(mesh.devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def bench_compile(cfg: RunConfig, topology: str) -> dict[str, Any]:
    """Compile for `topology`, such as v6e:2x4, with libtpu but without a TPU; or for `cpu`, with emulated devices."""
    emulated = dataclasses.replace(cfg.mesh, platform="cpu")
    with contextlib.nullcontext() if topology == "cpu" else hide_stderr("libtpu", "TPU_STDERR_LOG_LEVEL"):
        mesh = make_mesh(emulated) if topology == "cpu" else _tpu_mesh(cfg.mesh, topology)
        check_fit(cfg.data, cfg.model, mesh.shape, resizable=cfg.resizable)
        cfg = for_platform(cfg, "cpu" if topology == "cpu" else "tpu")
        chip = by_kind(mesh.devices.flat[0].device_kind)
        if cfg.train.remat == "auto" and chip is not None:
            cfg = with_remat(cfg, fastest_remat(cfg, mesh.shape, chip.memory))
        log.info("compiling ...")
        step = compile_train_step(cfg, mesh)
        compiled = step.compile(sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh))
    memory = compiled.memory_analysis()
    gib = {name: getattr(memory, f"{name}_size_in_bytes") / 2**30 for name in ("argument", "output", "alias", "temp")}
    return {
        "topology": f"{topology}, mesh {cfg.mesh}",
        "model_size": cfg.model_size,
        "parameters": count_parameters(cfg.model),
        "batch": f"{cfg.train.grad_accum} x {cfg.data.batch_size} x {cfg.data.seq_len}",
        "remat": cfg.train.kept,
        "compile_s": step.seconds,
        "state_and_batch_gib": gib["argument"],
        "temporaries_gib": gib["temp"],
        "peak_gib_per_chip": gib["argument"] + gib["output"] - gib["alias"] + gib["temp"],
        # Live bytes, without the fragmentation in the figure above. The TPU compiler rejects a program if they exceed
        # the chip's memory.
        "live_gib_per_chip": memory.peak_memory_in_bytes / 2**30,
        "collectives": ", ".join(f"{kind} {count}" for kind, count in count_collectives(compiled).items()),
    }


@contextlib.contextmanager
def hide_stderr(library: str, unless: str) -> Iterator[None]:
    """Hide what a C++ library writes to stderr and print the number of lines, unless an environment variable is set.

    This redirects the file descriptor, so Python's messages are hidden, too.
    """
    if unless in os.environ:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            if lines := sum(1 for _ in file):
                print(f"hid {lines} lines of {library}; {unless}=0 shows them", file=sys.stderr)


# --- the same step in PyTorch ----------------------------------------------------------------------------------------

_PROJECTIONS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}


def against_torch(cfg: RunConfig, *, steps: int, warmup: int) -> dict[str, Any]:
    """Measure PyTorch, then this package, on the same device, and return both and the ratio of their speeds."""
    hub = FORMATS.get(HUB)
    if hub is None or hub.transformers_config(cfg) is None:
        raise ConfigError(
            "--against torch: transformers lacks this model; use the dense decoder (--model-scales 1 --model-conv-taps 0 "
            "--model-residual plain --model-full-every 0 --model-window none)"
        )
    wanted = ["torch", "transformers", *(["peft"] if cfg.lora.rank else [])]
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"--against torch: {missing[0]} is not installed; pip install {' '.join(missing)}")
    _targets(cfg.lora)
    log.info("torch: eager, then compiled ...")
    # A separate process frees the device's memory before JAX starts, which reserves most of a GPU's.
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        theirs = pool.submit(TorchRun(cfg).measure, steps, warmup).result()
    log.info(f"torch: {theirs['tokens_per_s']:,.0f} tokens/s ({theirs['form']})")
    ours = bench_step(cfg, steps=steps, warmup=warmup)
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    return ours | {f"torch_{name}": value for name, value in theirs.items()} | {
        "torch_mfu": ours["mfu"] and ours["mfu"] / ratio, "ours_over_torch": ratio,
    }  # fmt: skip


def _targets(lora: LoraConfig) -> list[str]:
    """Return the projections with adapters; raise ConfigError for an unknown one."""
    known = [name for names in _PROJECTIONS.values() for name in names]
    groups = _PROJECTIONS | {"all": known}
    targets = groups.get(lora.targets) or [word.strip() for word in lora.targets.split(",")]
    if unknown := [name for name in targets if name not in known]:
        raise ConfigError(f"--against torch: unknown --lora-targets {unknown[0]}; use some of {', '.join(known)}")
    return targets


@dataclasses.dataclass(frozen=True)
class TorchRun:
    """A run, trained by transformers and PyTorch with their fastest settings.

    These are fused AdamW, bfloat16 autocast over float32 weights (frozen ones in bfloat16), SDPA, sequences without
    packed documents, PEFT's adapters, the faster of eager and compiled, and no recomputation unless memory runs out.
    """

    cfg: RunConfig

    def measure(self, steps: int, warmup: int) -> dict[str, Any]:
        """Measure eager and compiled, each without recomputation if that fits, and return the faster one."""
        import torch

        tried: dict[str, Any] = {}
        best: dict[str, Any] = {}
        for name, compiled in (("eager", False), ("compiled", True)):
            try:
                figures = self._measure_form(compiled, steps, warmup)
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

    def _measure_form(self, compiled: bool, steps: int, warmup: int) -> dict[str, Any] | None:
        import torch

        for recompute in (False, True):
            with contextlib.suppress(torch.OutOfMemoryError):
                return self._time(compiled, recompute, steps, warmup)
            torch.cuda.empty_cache()
        return None

    def _time(self, compiled: bool, recompute: bool, steps: int, warmup: int) -> dict[str, Any]:
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model = self.model(device)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if compiled:
            model = torch.compile(model)
        times, losses = time_steps(self.train(model, device), steps, warmup)
        seconds, data = statistics.median(times), self.cfg.data
        return {
            "step_ms": seconds * 1e3,
            "tokens_per_s": self.cfg.train.grad_accum * data.batch_size * data.seq_len / seconds,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
            "recomputes": recompute,
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }

    def model(self, device: Any) -> Any:
        import torch
        import transformers

        model, lora = self.cfg.model, self.cfg.lora
        assert isinstance(model, ModelConfig)
        values = FORMATS[HUB].transformers_config(self.cfg)
        assert values is not None
        # Our tied embeddings have a factor that transformers lacks, which does not affect the speed.
        config = transformers.AutoConfig.for_model(**values | {"tie_word_embeddings": model.tied_embeddings})
        with device:
            torch.manual_seed(self.cfg.train.seed)
            theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        if lora.rank:
            import peft

            settings: dict[str, Any] = {
                "r": lora.rank, "lora_alpha": 2 * lora.rank if lora.alpha is None else lora.alpha, "lora_dropout": lora.dropout,
                "target_modules": _targets(lora), "use_rslora": lora.rslora, "task_type": "CAUSAL_LM",
            }  # fmt: skip
            theirs = peft.get_peft_model(theirs.to(getattr(torch, lora.base_dtype)), peft.LoraConfig(**settings))
        return theirs.train()

    def train(self, model: Any, device: Any) -> Iterator[Any]:
        """Train, and yield the loss of each step, on the device."""
        import torch

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        o, data, accum = self.cfg.optim, self.cfg.data, self.cfg.train.grad_accum
        optimizer = torch.optim.AdamW(
            trained, lr=o.learning_rate, betas=(o.b1, o.b2), weight_decay=o.weight_decay, fused=True
        )  # fmt: skip
        tokens = np.random.default_rng(0).integers(0, self.cfg.model.vocab_size, (data.batch_size, data.seq_len))
        tokens_BT = torch.from_numpy(tokens).to(device)
        while True:
            losses = []
            for _ in range(accum):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss / accum
                loss.backward()
                losses.append(loss.detach())
            torch.nn.utils.clip_grad_norm_(trained, o.max_grad_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield sum(losses)
