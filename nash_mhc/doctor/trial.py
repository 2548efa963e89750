"""Try what a run does: write to its storage, train two steps, save a checkpoint and restore it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nash_mhc.config import presets
from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ModelConfig, RunConfig
from nash_mhc.doctor.findings import OK, WARNING, Finding, size
from nash_mhc.doctor.isolated import CheckFailed, Reporter
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.files import Folder, is_remote, to_path

_BYTES, _BYTES_REMOTE = 64 << 20, 8 << 20  # written and read back; fewer over a network
_LOW_DISK = 5e9  # bytes: a few checkpoints of the smaller presets
_STEPS, _ROWS_PER_DEVICE = 2, 2
_SENTENCE = "The doctor came by at {} and found that all was well.\n\n"


def check_storage(reporter: Reporter, *, folder: str, run_folder: str) -> None:
    remedy = f"give this user write access to {folder}, or name another folder here and with train --checkpoint-dir"
    with contextlib.suppress(CheckFailed), reporter.section("storage", f"writing to {folder}", remedy), as_os_errors():
        _check_rates(reporter, to_path(folder))
    remedy = "set JAX_COMPILATION_CACHE_DIR to a directory that you can write"
    with reporter.section("compilation cache", "looking for the cache", remedy, status=WARNING):
        _check_cache(reporter, to_path(run_folder))


@contextlib.contextmanager
def _created(folder: Folder) -> Iterator[Folder]:
    """Create the folder and its parents; afterwards remove those that did not exist."""
    if is_remote(folder):
        yield folder
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # another process has put something there
                path.rmdir()


def _read_from_disk(path: Folder) -> bytes:
    """Read a file after dropping it from the page cache, where the system allows that."""
    if not is_remote(path) and hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path.read_bytes()


def _check_rates(reporter: Reporter, folder: Folder) -> None:
    """Measure how fast the storage is written (durably) and read."""
    content = os.urandom(1 << 20) * ((_BYTES_REMOTE if is_remote(folder) else _BYTES) >> 20)
    with _created(folder):
        trial = folder / f".doctor-{uuid.uuid4().hex[:12]}"
        files.make(trial)
        try:
            start = time.perf_counter()
            files.write_atomic(trial / "written", content)
            written = time.perf_counter()
            content_read = _read_from_disk(trial / "written")
            end = time.perf_counter()
        finally:
            files.remove(trial)
        if content_read != content:
            raise OSError("the bytes read differ from the bytes written")
        free = None if is_remote(folder) else shutil.disk_usage(folder).free
    write, read = (len(content) / max(seconds, 1e-9) for seconds in (written - start, end - written))
    text = f"{folder}: writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s"
    text += "" if free is None else f", {size(free)} free"
    low = free is not None and free < _LOW_DISK
    remedy = "free space, or name a folder on another disk: a checkpoint takes about 12 bytes per parameter" if low else ""
    figures = {"folder": str(folder), "write": write, "read": read, "free": free}
    reporter.found(Finding("storage", WARNING if low else OK, text, remedy, figures))


def _check_cache(reporter: Reporter, folder: Folder) -> None:
    """Try the directory that `runtime/compiled.py` would use for compiled programs."""
    variable = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if variable == "":
        remedy = "unset JAX_COMPILATION_CACHE_DIR: with an empty value, every start compiles again"
        reporter.found(Finding("compilation cache", WARNING, "switched off", remedy))
        return
    default = (Path("runs") if is_remote(folder) else folder.parent) / ".jax_cache"
    cache = to_path(variable) if variable else default.absolute()
    new = not files.exists(cache)
    try:
        with _created(cache), as_os_errors():
            trial = cache / f".doctor-{uuid.uuid4().hex[:12]}"
            trial.write_bytes(b"x")
            trial.unlink()
    except OSError as error:
        remedy = "set JAX_COMPILATION_CACHE_DIR to another directory: without a cache every start compiles again"
        text = f"{cache}: cannot be written ({error.strerror or error})"
        reporter.found(Finding("compilation cache", WARNING, text, remedy))
        return
    reporter.ok(
        "compilation cache", f"{cache}, writable{' (a run creates it)' if new else ''}", folder=str(cache), new=new
    )  # fmt: skip


def fast_compilation(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a smoke test on a CPU: compile fast, run slowly."""
    flags = env.get("XLA_FLAGS", "")
    wanted = ["--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith("0.10."):  # other versions of XLA may abort at an unknown flag
        wanted.append("--xla_cpu_use_fusion_emitters=false")  # halves the compilation
    return {**env, "XLA_FLAGS": " ".join([flags, *(flag for flag in wanted if flag.partition("=")[0] not in flags)]).strip()}


def _smoke_config(scratch: Path, platform: str, count: int) -> RunConfig:
    """Return the tiny preset without evaluation and samples, which would be more programs to compile.

    On a CPU, where compilation takes most of the time, the model is smaller but has every part. On an accelerator it
    is the full preset, so that the kernels of a real run are tried.
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
        data=replace(cfg.data, batch_size=_ROWS_PER_DEVICE * count, **data),
        mesh=replace(cfg.mesh, platform=platform, data=-1, num_processes=1),
        optim=replace(cfg.optim, warmup_steps=0),
        train=replace(
            cfg.train, total_steps=_STEPS, log_interval=1, eval_interval=0, checkpoint_interval=_STEPS,
            checkpoint_dir=str(scratch / "run"),
        ),
        telemetry=replace(cfg.telemetry, sample_tokens=0),
    )  # fmt: skip


def _check_restore(folder: Path, state: Any) -> None:
    """Raise RuntimeError unless the checkpoint is complete and restores bit for bit."""
    import jax
    import numpy as np

    from nash_mhc.checkpoint import manifest
    from nash_mhc.checkpoint.run_folder import RunFolder
    from nash_mhc.checkpoint.store import Store
    from nash_mhc.parallel.params import named_leaves

    if problem := manifest.problem(RunFolder(folder).checkpoints / str(_STEPS)):
        raise RuntimeError(f"the checkpoint is incomplete: {problem}")
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    with Store(folder) as store:
        restored = named_leaves(store.restore(_STEPS, like)[0])
    for name, leaf in named_leaves(state).items():
        if np.asarray(leaf).tobytes() != np.asarray(restored[name]).tobytes():
            raise RuntimeError(f"{name} differs after the restore")


def smoke_test(reporter: Reporter, *, scratch: str, platform: str, count: int) -> None:
    start = time.monotonic()
    train = module_command("nash_mhc.train", "--total-steps", "2")
    remedy = f"please report it with the file that --json FILE writes and the output of {train}"
    with reporter.section("smoke test", "starting", remedy, patience=5.0):
        from nash_mhc.checkpoint.run_folder import RunFolder
        from nash_mhc.train.callbacks import EachStep
        from nash_mhc.train.trainer import run

        cfg = _smoke_config(Path(scratch), platform, count)
        reporter.progress("compiling the step of a small model")
        step_times: list[float] = []

        def after_step(number: int) -> None:
            step_times.append(time.monotonic() - start)
            reporter.progress(f"step {number} of {_STEPS} done{'; saving' if number == _STEPS else ''}")

        result = run(cfg, quiet=True, callbacks=[EachStep(after_step)])
        losses = [row["loss"] for row in RunFolder(result.folder).rows()]
        if len(losses) != _STEPS or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            raise RuntimeError(f"expected {_STEPS} finite losses, got {losses}")
        reporter.progress("restoring")
        _check_restore(Path(result.folder), result.state)
        seconds = time.monotonic() - start
        text = (
            f"{_STEPS} steps (loss {' -> '.join(f'{loss:.3f}' for loss in losses)}), saved, verified, restored bit for bit; "
            f"{seconds:.0f} s, {step_times[0]:.0f} s until the first step"
        )
        reporter.ok("smoke test", text, losses=losses, seconds=seconds, until_first_step=step_times[0])
