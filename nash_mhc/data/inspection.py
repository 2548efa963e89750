"""Show the documents in prepared rows and in the steps of a run: from metrics.jsonl back to the text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.humanize import counted
from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Rows, RowSource
from nash_mhc.data.prepared.folder import FILE, Damaged, PreparedRows, check_files
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.storage.files import reading


def summarize_epochs(epochs: Mapping[str, float]) -> str:
    """Return `reads 35% of notes/, web 3.2 times`; empty without finite datasets."""
    parts = [f"{share:.0%} of {name}" if share <= 1 else f"{name} {share:.3g} times" for name, share in epochs.items()]
    return f"reads {', '.join(parts)}" if parts else ""


def origins(source: PreparedRows, row: int) -> list[tuple[int, str, int]]:
    """Return (slot, file:line, slots of the document before it) of every piece of a row."""
    shard, inside = source.records.locate(row)
    name = f"{source.shards[shard].name}.origins"
    check_files(source.folder, {name: (None, source.shards[shard].origins_sha256)})
    with reading(source.folder / FILE, "prepare the data again", Damaged):
        table = np.load(source.folder / name)
        of_row = table[np.searchsorted(table[:, 0], inside, "left") : np.searchsorted(table[:, 0], inside, "right")]
        return [(int(slot), f"{source.manifest.files[file]}:{line}", int(offset)) for _, slot, file, line, offset in of_row]


def show_row(title: str, row: Rows, tokenizer: Tokenizer, places: list[tuple[int, str, int]], *, color: bool = False) -> str:
    """Render every document of a row with its source. Text that is not in the loss is put in [[ ]]; with color, text in
    the loss is green instead."""
    text = int((row.segments > 0).sum())
    lines = [
        f"== {title}: {counted(int(row.segments.max()), 'document')}, {int(row.weights.sum())} of {text} slots in the loss"
    ]
    by_slot = {slot: (place, offset) for slot, place, offset in places}
    for segment in range(1, int(row.segments.max()) + 1):
        slots = np.flatnonzero(row.segments == segment)
        place, offset = by_slot.get(int(slots[0]), ("", 0))
        continued = f", continued from token {offset}" if offset else ""
        lines.append(f"-- slots {slots[0]} to {slots[-1]}{f', {place}' if place else ''}{continued}")
        lines.append(_render(row, slots, tokenizer, color))
    return "\n".join(lines)


def _render(row: Rows, slots: np.ndarray, tokenizer: Tokenizer, color: bool) -> str:
    """Render the targets of a document, without the gap that follows it."""
    targets, scored = row.targets[slots], row.weights[slots] > 0
    if scored.any():  # a document ends with a scored target; gap slots are not scored
        stop = int(np.flatnonzero(scored)[-1]) + 1
        targets, scored = targets[:stop], scored[:stop]
    borders = [0, *(np.flatnonzero(np.diff(scored)) + 1).tolist(), len(scored)]
    runs = [(tokenizer.decode(targets[a:b]), scored[a]) for a, b in pairwise(borders) if b > a]
    if color:
        return "".join(_green(text) if is_scored else text for text, is_scored in runs)
    return "".join(text if is_scored else f"[[{text}]]" for text, is_scored in runs)


def _green(text: str) -> str:
    """Color each line separately, because pagers reset colors at line ends."""
    return "\n".join(f"\x1b[32m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def rows_of_step(source: RowSource, step: int, rows: int, seed: int, *, most: int = 16) -> str:
    """Return `rows 5, 17, 101 of text.txt` for a step, counted from 1; at most `most` rows are listed."""
    by_name: dict[str, list[str]] = {}
    for number in range(min(rows, most)):
        leaf, index = source.locate((step - 1) * rows + number, seed)
        by_name.setdefault(leaf.name, []).append(str(index))
    named = ", ".join(f"{'rows' if len(each) > 1 else 'row'} {', '.join(each)} of {name}" for name, each in by_name.items())
    return f"{named}{f' and {rows - most:,} more' if rows > most else ''}"


def _show_step(
    source: RowSource, tokenizer: Tokenizer, step: int, row: int | None, n_rows: int, seed: int, *, color: bool
) -> str:
    """Render the rows of a step, counted from 1 as in metrics.jsonl, or one of them."""
    if row is not None and not 0 <= row < n_rows:
        raise ConfigError(f"--row {row}: a step of this run has rows 0 to {n_rows - 1}")
    shown = []
    for number in range(n_rows) if row is None else [row]:
        dataset, index = source.locate((step - 1) * n_rows + number, seed)
        title = f"step {step}, row {number}: row {index} of {dataset.name}"
        if text := dataset.show(index):
            shown.append(f"== {title}\n{text}")
        else:
            places = origins(dataset, index) if isinstance(dataset, PreparedRows) else []
            shown.append(show_row(title, dataset[index], tokenizer, places, color=color))
    return "\n".join(shown)


def of_run(run: RunFolder, step: int | None, row: int | None, *, color: bool = False) -> str:
    """Show the documents of a step of a run, or without a step, a summary of its data."""
    info, cfg = run.info(), run.config()
    tokenizer, seed = load_tokenizer(cfg.data.tokenizer, begin_with_end=cfg.data.begin_with_end), cfg.train.seed
    source = open_source(cfg.data, tokenizer, split=cfg.data.split, seed=seed, align=cfg.model.alignment)
    if info.get("rows", source.identity) != source.identity:
        raise ConfigError(f"{run}: the data of --dataset {cfg.data.dataset} has changed since the run started; restore it")
    rows = cfg.data.batch_size * cfg.train.grad_accum
    if step is None:
        read = summarize_epochs(source.epochs(cfg.train.total_steps * rows))
        return f"{cfg.data.dataset}: {rows} sequences of {cfg.data.seq_len} per step; {read or 'endless'}"
    # Metrics are written at intervals: the run may have continued for almost one interval after the last row.
    last = max(int(run.last_row().get("step", 0)), *run.steps(), 0)
    last = min(last + cfg.train.log_interval - 1, cfg.train.total_steps)
    if step > last:
        raise ConfigError(f"--step {step}: beyond the last step of this run ({last}, by its metrics and checkpoints)")
    return _show_step(source, tokenizer, step, row, rows, seed, color=color)


def of_prepared(
    folder: Path,
    split: str,
    step: int | None,
    row: int | None,
    *,
    batch_size: int = 8,
    grad_accum: int = 1,
    seed: int = 0,
    color: bool = False,
) -> str:
    """Show statistics of a prepared folder, one of its rows, or a step of a run that reads only this folder."""
    if not (folder / FILE).exists():
        raise ConfigError(f"{folder}: neither prepared data nor a run; give a folder written by `data prepare` or `train`")
    source = PreparedRows(folder, split)
    tokenizer = load_tokenizer(str(folder / "tokenizer") if (folder / "tokenizer").exists() else "bytes")
    if step is not None:
        if batch_size < 1 or grad_accum < 1 or seed < 0:
            raise ConfigError("--batch-size and --grad-accum must be at least 1 and --seed at least 0")
        return _show_step(source, tokenizer, step, row, batch_size * grad_accum, seed, color=color)
    if row is None:
        return _statistics(source)
    if not 0 <= row < len(source):
        raise ConfigError(f"--row {row}: split {split!r} has rows 0 to {len(source) - 1}")
    return show_row(f"row {row} of {split}", source[row], tokenizer, origins(source, row), color=color)


def _statistics(source: PreparedRows) -> str:
    manifest, recipe = source.manifest, source.manifest.recipe
    sample = source.take(np.linspace(0, len(source) - 1, min(len(source), 1000)).astype(int))
    documents = sample.segments.max(axis=1)
    tokens = sum(split.tokens for split in manifest.splits.values())
    return "\n".join(
        [
            manifest.summary(),
            f"{manifest.bytes / max(tokens, 1):.2f} bytes/token; documents start at multiples of {recipe['align']}",
            f"documents/sequence: {documents.mean():.1f} on average, at most {documents.max()} ({len(documents):,} sampled)",
            f"tokenizer: {recipe['tokenizer']['vocab_size']:,} tokens, {recipe['tokenizer']['fingerprint'][:16]}",
            f"content {recipe['content'][:16]}, rows {manifest.identity[:16]}; all hashes match",
        ]
    )
