"""Two real steps, a save and a restore: `train`'s own run, in a folder that vanishes afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nash_mhc.config import presets
from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ModelConfig, RunConfig
from nash_mhc.doctor.teller import Teller

_STEPS, _ROWS = 2, 2  # of the run; of a step, on each device
_SENTENCE = "The doctor came by at {} and found that all was well.\n\n"


def hurried(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run on a CPU whose two steps may be slow, if only their compiler is not."""
    flags = env.get("XLA_FLAGS", "")
    wanted = ["--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith("0.10."):
        # Its newer code generator for fused loops is half of the time. An XLA that does not know a flag would stop.
        wanted.append("--xla_cpu_use_fusion_emitters=false")
    return {**env, "XLA_FLAGS": " ".join([flags, *(flag for flag in wanted if flag.partition("=")[0] not in flags)]).strip()}


def config(scratch: Path, platform: str, count: int) -> RunConfig:
    """The tiny preset, without an evaluation and a sample, which would be programs of their own.

    On a CPU, where compiling is most of the time, everything that the model has once: a layer, two scales, two streams.
    On an accelerator it is the whole preset, so that the kernels that a run takes there are tried.
    """
    cfg = presets.run("tiny")
    text = scratch / "text.txt"
    text.write_text("".join(_SENTENCE.format(number) for number in range(400 * count)), encoding="utf-8")
    data: dict[str, Any] = {"dataset": str(text), "cache_dir": str(scratch / "data"), "validation_fraction": 0.0}
    if platform == "cpu" and isinstance(cfg.model, ModelConfig):
        small = replace(cfg.model, layers=1, scales=2, streams=2, width=64, ffn=128, heads=4, kv_heads=4)
        cfg = replace(cfg, model=small, data=replace(cfg.data, seq_len=64))
    return replace(
        cfg,
        data=replace(cfg.data, batch_size=_ROWS * count, **data),
        mesh=replace(cfg.mesh, platform=platform, data=-1, num_processes=1),
        optim=replace(cfg.optim, warmup_steps=0),
        train=replace(
            cfg.train, total_steps=_STEPS, log_interval=1, eval_interval=0, checkpoint_interval=_STEPS,
            checkpoint_dir=str(scratch / "run"),
        ),
        telemetry=replace(cfg.telemetry, sample_tokens=0),
    )  # fmt: skip


def _restored(folder: Path, state: Any) -> None:
    """RuntimeError where the checkpoint is not whole, or where what comes back is not what was saved, bit for bit."""
    import jax
    import numpy as np

    from nash_mhc.checkpoint import manifest
    from nash_mhc.checkpoint.run_folder import RunFolder
    from nash_mhc.checkpoint.store import Store
    from nash_mhc.parallel.params import named_leaves

    if wrong := manifest.problem(RunFolder(folder).checkpoints / str(_STEPS)):
        raise RuntimeError(f"the checkpoint is not whole: {wrong}")
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    with Store(folder) as store:
        again, _ = store.restore(_STEPS, like)
    found = named_leaves(again)
    for name, leaf in named_leaves(state).items():
        if np.asarray(leaf).tobytes() != np.asarray(found[name]).tobytes():
            raise RuntimeError(f"{name} comes back from the checkpoint as something else")


def check(tell: Teller, *, scratch: str, platform: str, count: int) -> None:
    began = time.monotonic()
    remedy = "please report it with --json FILE's contents, and the output of "
    remedy += module_command("nash_mhc.train", "--total-steps", "2")
    with tell.part("smoke test", "starting", remedy, patience=5.0):
        from nash_mhc.checkpoint.run_folder import RunFolder
        from nash_mhc.train.callbacks import EachStep
        from nash_mhc.train.trainer import run

        cfg = config(Path(scratch), platform, count)
        tell.say("compiling the step of a small model")
        first: list[float] = []

        def each_step(number: int) -> None:
            first.append(time.monotonic() - began)
            tell.say(f"step {number} of {_STEPS} is done" + "; saving" * (number == _STEPS))

        result = run(cfg, quiet=True, callbacks=[EachStep(each_step)])
        losses = [row["loss"] for row in RunFolder(result.folder).rows()]
        if len(losses) != _STEPS or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            raise RuntimeError(f"the losses of {_STEPS} steps should be finite numbers, and are {losses}")
        tell.say("restoring")
        _restored(Path(result.folder), result.state)
        seconds = time.monotonic() - began
        text = (
            f"{_STEPS} steps (loss {' -> '.join(f'{loss:.3f}' for loss in losses)}), saved, verified, restored bit for bit; "
            f"{seconds:.0f} s, {first[0]:.0f} of them until the first step"
        )
        tell.ok("smoke test", text, losses=losses, seconds=seconds, until_first_step=first[0])
