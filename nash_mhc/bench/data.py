"""`bench data` and `bench telemetry`: the cost of the input and of the metrics of a run.

The text of `bench data` is synthetic: random words with Zipf frequencies, in documents of very different lengths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from nash_mhc.checkpoint.run_folder import Row, RunFolder
from nash_mhc.config.schema import ConfigError, DataConfig, RunConfig
from nash_mhc.data.loader import batches
from nash_mhc.data.prepared.folder import PreparedRows
from nash_mhc.data.prepared.prepare import prepare
from nash_mhc.data.recipe import make_recipe
from nash_mhc.data.sources import open_corpus
from nash_mhc.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.train.callbacks import StepLog
from nash_mhc.train.samples import Samples
from nash_mhc.train.trainer import run

log = logging.getLogger(__name__)
_SECONDS = 3.0  # to read sequences
_ROWS = 64  # smallest batch to read: a consumer at such a rate reads large batches
_VOCABULARY = 8192
# Targets: reading in tokens/s, preparing as a share of the tokenizers library's rate, waiting as a share of the step.
LEAST_READ, LEAST_SHARE, MOST_WAIT = 5e6, 0.8, 0.02
MOST_TELEMETRY = 0.01  # target: largest share of a run's time, at its own intervals
_EVALUATIONS = 4  # of `bench telemetry`; the first one compiles
_READ_ALL = (
    "import sys; from pathlib import Path; from nash_mhc.data.prepared.folder import PreparedRows\n"
    "rows = PreparedRows(Path(sys.argv[1]), 'train')\n"
    "for i in range(0, len(rows), 64): rows.take(list(range(i, min(i + 64, len(rows)))))\n"
)


def make_texts(size: int, seed: int = 0) -> Iterator[str]:
    """Yield documents with `size` bytes in total."""
    rng = np.random.default_rng(seed)
    letters, odds = np.array(list("etaoinshrdlucmfwypvbgkjqxz")), np.arange(26, 0, -1.0) ** 1.2
    lengths, below = rng.integers(2, 11, 40_000), np.cumsum(odds / odds.sum())
    drawn = letters[np.searchsorted(below / below[-1], rng.random(lengths.sum()), side="right")]
    words = np.array(["".join(word) for word in np.split(drawn, np.cumsum(lengths)[:-1])], dtype=object)
    zipf = np.cumsum(1 / np.arange(1, len(words) + 1))
    while size > 0:
        count = int(rng.lognormal(5.5, 1.0)) + 5
        text = " ".join(words[np.searchsorted(zipf, rng.random(count) * zipf[-1])])
        size -= len(text)
        yield text


def library_rate(tokenizer_file: Path, texts: list[str]) -> float:
    """Return the tokens/s of the tokenizers library's batch encoding, on all cores."""
    from tokenizers import Tokenizer as Backend

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    backend = Backend.from_file(str(tokenizer_file))
    began, count = time.perf_counter(), 0
    for start in range(0, len(texts), 1000):
        count += sum(len(e) for e in backend.encode_batch(texts[start : start + 1000], add_special_tokens=False))
    return count / (time.perf_counter() - began)


def read_rate(source: PreparedRows, data: DataConfig, accum: int, seed: int) -> float:
    """Return the tokens/s of reading sequences in the order of a run."""
    size = max(data.batch_size, _ROWS)
    reader = batches(source, batch_size=size, grad_accum=accum, seed=seed, buffer=data.worker_buffer_size)
    try:
        next(reader)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < _SECONDS:
            next(reader)
            steps += 1
        return steps * size * accum * data.seq_len / (time.perf_counter() - began)
    finally:
        reader.close()  # type: ignore[attr-defined]


def _resident(pid: int) -> int:
    """Return the resident KiB of a process and its descendants; 0 if it has ended.

    Not ru_maxrss, whose peak a new process inherits from its parent.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0)
    return own + sum(_resident(int(child)) for child in children)


def peak_memory(argv: list[str]) -> float | None:
    """Return the sampled peak MiB of a command's processes together, or None without /proc."""
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _resident(process.pid))
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{argv} exited with code {process.returncode}")
    return peak / 1024 or None


def short_run(cfg: RunConfig, folder: str | Path, steps: int, **train: Any) -> list[Row]:
    """Train for a few steps, with these settings of `train`, and return the rows of metrics."""
    train_cfg = dataclasses.replace(
        cfg.train, total_steps=steps, epochs=None, checkpoint_interval=0, checkpoint_dir=str(folder), **train
    )
    optim = dataclasses.replace(cfg.optim, warmup_steps=min(cfg.optim.warmup_steps, steps))
    run(dataclasses.replace(cfg, train=train_cfg, optim=optim), quiet=True)
    return [row for row in RunFolder(folder).rows() if "step_ms" in row]


def bench_data(cfg: RunConfig, *, megabytes: int, steps: int) -> dict[str, Any]:
    if megabytes < 1 or steps < 4:
        raise ConfigError("--megabytes must be at least 1 and --steps at least 4")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = list(make_texts(megabytes << 20))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "one.jsonl").write_text(lines)
        (folder / "four.jsonl").write_text(lines * 4)
        train_bpe(texts[: len(texts) // 8], _VOCABULARY, folder / "bpe")

        def prepared(tokenizer: Tokenizer, out: str) -> tuple[PreparedRows, float]:
            """Return the prepared sequences, and the tokens/s of preparation, including processes and hashes."""
            data = dataclasses.replace(cfg.data, dataset=str(folder / "one.jsonl"))
            began = time.perf_counter()
            corpus = open_corpus(data)
            recipe = make_recipe(data, tokenizer, corpus, cfg.model.alignment)
            manifest = prepare(recipe, tokenizer, corpus, folder / out, dataset=data.dataset)
            tokens = sum(split.tokens for split in manifest.splits.values())
            return PreparedRows(folder / out, "train"), tokens / (time.perf_counter() - began)

        log.info("tokenizing ...")
        before = library_rate(folder / "bpe" / "tokenizer.json", texts)
        bpe, rate = prepared(load_tokenizer(str(folder / "bpe")), "rows-bpe")
        # The machine's speed may vary; take the better of two measurements.
        library = max(before, library_rate(folder / "bpe" / "tokenizer.json", texts))
        rows, bytes_rate = prepared(ByteTokenizer(), "rows-bytes")
        log.info("reading ...")
        read = read_rate(bpe, cfg.data, cfg.train.grad_accum, cfg.train.seed)
        log.info("measuring memory ...")
        memory = {}
        for size, suffix in (("one", ""), ("four", "_of_4x")):
            files = ["--dataset", str(folder / f"{size}.jsonl"), "--out", str(folder / size)]
            prepare_command = ["-m", "nash_mhc.data", "prepare", *files, "--seq-len", str(cfg.data.seq_len)]
            memory[f"prepare_memory_mib{suffix}"] = peak_memory(prepare_command)
            memory[f"read_memory_mib{suffix}"] = peak_memory(["-c", _READ_ALL, str(folder / size)])
        log.info("training ...")
        on_prepared = dataclasses.replace(
            cfg, data=dataclasses.replace(cfg.data, dataset=str(folder / "rows-bytes"), tokenizer="bytes")
        )
        metrics = short_run(
            on_prepared, folder / "run", steps, log_interval=max(1, steps // 4), eval_interval=0, eval_batches=1
        )[1:]  # without the first quarter
        step_ms, wait_ms = (float(np.mean([row[name] for row in metrics])) for name in ("step_ms", "data_wait_ms"))
        waiting = wait_ms / step_ms
        return {
            "cores": os.cpu_count() or 1,
            "text_mib": megabytes,
            "batch": f"{cfg.train.grad_accum} x {cfg.data.batch_size} x {cfg.data.seq_len}",
            "read_rows_a_step": max(cfg.data.batch_size, _ROWS) * cfg.train.grad_accum,
            "read_tokens_per_s": read,
            "prepare_tokens_per_s": rate,
            "library_tokens_per_s": library,
            "share_of_library": rate / library,
            "prepare_bytes_per_s": bytes_rate,
            "padding": bpe.manifest.padding("train"),
            **memory,
            "step_ms": step_ms,
            "data_wait_share": waiting,
            "rows": len(rows),
            "targets": targets(read, rate / library, waiting),
        }


def targets(read: float, share: float, waiting: float) -> str:
    """Return which of the three targets are met."""
    met = {
        f"{LEAST_READ / 1e6:.0f} million tokens/s": read >= LEAST_READ,
        f"{LEAST_SHARE} of the library": share >= LEAST_SHARE,
        f"waiting under {MOST_WAIT:.0%} of a step": waiting < MOST_WAIT,
    }
    return "; ".join(f"{name}: {'met' if ok else 'NOT met'}" for name, ok in met.items())


# --- telemetry -------------------------------------------------------------------------------------------------------


def bench_telemetry(cfg: RunConfig, *, steps: int) -> dict[str, Any]:
    """Train for `steps` steps in a temporary directory, with the telemetry of the configuration."""
    if steps < 2 * _EVALUATIONS:
        raise ConfigError(f"--steps must be at least {2 * _EVALUATIONS}, not {steps}")
    interval, train = steps // _EVALUATIONS, cfg.train
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        row_times = stack.enter_context(_timed(StepLog, "write_row"))
        evaluation_times = stack.enter_context(_timed(Telemetry, "write", lambda options: "file" in options))
        sample_times = stack.enter_context(_timed(Samples, "write"))
        rows = short_run(cfg, folder, steps, log_interval=max(1, interval // 4), eval_interval=interval)
    step = statistics.median(row["step_ms"] for row in rows)
    # The host time of rows counts although it overlaps with device work. The first call of each kind compiles: skip it.
    each = (row_times, evaluation_times, sample_times)
    row, evaluation, sample = (1e3 * statistics.median(times[1:] or [0.0]) for times in each)
    share = row / (train.log_interval * step)
    if train.eval_interval:
        share += (evaluation + sample) / (train.eval_interval * step)
    return {
        "step_ms": step,
        "row_ms": row,
        "evaluation_row_and_pictures_ms": evaluation,
        "sample_ms": sample,
        "sample_tokens": cfg.telemetry.sample_tokens,
        "log_interval": train.log_interval,
        "eval_interval": train.eval_interval,
        "share_of_the_step": share,
        "promised": MOST_TELEMETRY,
        "kept": share <= MOST_TELEMETRY,
    }


@contextlib.contextmanager
def _timed(kind: type, method: str, counts: Callable[[dict[str, Any]], bool] = lambda options: True) -> Iterator[list[float]]:
    """Yield the seconds of each call of a method; `counts` selects calls by their named arguments."""
    inner, seconds = getattr(kind, method), list[float]()

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = inner(self, *args, **options)
        if counts(options):
            seconds.append(time.perf_counter() - start)
        return result

    with mock.patch.object(kind, method, timed):
        yield seconds
