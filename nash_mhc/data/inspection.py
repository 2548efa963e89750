"""What is in prepared rows, and which documents a step of a run has read:
from a number in metrics.jsonl back to the text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.humanize import counted
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.mixture import Mixture, RowSource, ShowsRows, passes
from nash_mhc.data.order import shuffled
from nash_mhc.data.pack import Rows
from nash_mhc.data.prepared.manifest import FILE, Damaged, Manifest, check_files
from nash_mhc.data.prepared.rows import PreparedRows
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.storage.json_files import reading


def origins(source: PreparedRows, row: int) -> list[tuple[int, str, int]]:
    """(slot, file:line, slots of the document before it) of every piece of a row."""
    shard, inside = source.locate(row)
    name = f"{source.shards[shard].name}.origins"
    check_files(source.folder, {name: (None, source.shards[shard].origins_sha256)})
    with reading(source.folder / FILE, "prepare the data again", Damaged):
        table = np.load(source.folder / name)
        mine = table[np.searchsorted(table[:, 0], inside, "left") : np.searchsorted(table[:, 0], inside, "right")]
        return [(int(slot), f"{source.manifest.files[file]}:{line}", int(offset)) for _, slot, file, line, offset in mine]


def show_row(title: str, row: Rows, tokenizer: Tokenizer, places: list[tuple[int, str, int]], *, color: bool = False) -> str:
    """Every document of a row, with where it is from. What is read but does not count in the loss stands in [[ ]];
    in colour, what counts is green instead."""
    text = int((row.segments > 0).sum())
    lines = [f"== {title}: {counted(int(row.segments.max()), 'document')}, {int(row.weights.sum())} of {text} slots count"]
    by_slot = {slot: (place, offset) for slot, place, offset in places}
    for segment in range(1, int(row.segments.max()) + 1):
        slots = np.flatnonzero(row.segments == segment)
        place, offset = by_slot.get(int(slots[0]), ("", 0))
        continued = f", from its token {offset} on" if offset else ""
        lines.append(f"-- slots {slots[0]} to {slots[-1]}{f', {place}' if place else ''}{continued}")
        lines.append(_text(row, slots, tokenizer, color))
    return "\n".join(lines)


def _text(row: Rows, slots: np.ndarray, tokenizer: Tokenizer, color: bool) -> str:
    """The targets of a document, in runs that count and runs that do not;
    the filling up to the next start is left out."""
    targets, counts = row.targets[slots], row.weights[slots] > 0
    if not counts.all():  # after the last target that counts there is only filling
        last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else len(counts)
        targets, counts = targets[:last], counts[:last]
    borders = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    runs = [(tokenizer.decode(targets[a:b]), counts[a]) for a, b in pairwise(borders) if b > a]
    if color:
        return "".join(_green(text) if is_scored else text for text, is_scored in runs)
    return "".join(text if is_scored else f"[[{text}]]" for text, is_scored in runs)


def _green(text: str) -> str:
    """Line by line: a pager forgets the colour at the end of one."""
    return "\n".join(f"\x1b[32m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def _at(source: RowSource, position: int, seed: int) -> tuple[RowSource, int]:
    """The row that a position of a run reads."""
    if isinstance(source, Mixture):
        return source.locate(position)
    return source, position if source.endless else int(shuffled(np.array([position]), len(source), seed=seed)[0])


def rows_of_step(source: RowSource, step: int, rows: int, seed: int, *, most: int = 16) -> str:
    """`rows 5, 17, 101 of text.txt` for a step, counted from 1; of a large one only the first few are named."""
    found: dict[str, list[str]] = {}
    for number in range(min(rows, most)):
        leaf, index = _at(source, (step - 1) * rows + number, seed)
        found.setdefault(leaf.name, []).append(str(index))
    named = ", ".join(f"{'rows' if len(each) > 1 else 'row'} {', '.join(each)} of {name}" for name, each in found.items())
    return f"{named}{f' and {rows - most:,} more' if rows > most else ''}"


def of_step(
    source: RowSource, tokenizer: Tokenizer, step: int, row: int | None, rows: int, seed: int, *, color: bool = False
) -> str:
    """The rows of a step, counted from 1 as in metrics.jsonl, or one of them."""
    if row is not None and not 0 <= row < rows:
        raise ConfigError(f"--row {row}: a step of this run has rows 0 to {rows - 1}")
    shown = []
    for number in range(rows) if row is None else [row]:
        leaf, index = _at(source, (step - 1) * rows + number, seed)
        places = origins(leaf, index) if isinstance(leaf, PreparedRows) else []
        title = f"step {step}, row {number}: row {index} of {leaf.name}"
        if isinstance(leaf, ShowsRows):
            shown.append(f"== {title}\n{leaf.show(index)}")
        else:
            shown.append(show_row(title, leaf[index], tokenizer, places, color=color))
    return "\n".join(shown)


def _furthest(run: RunFolder, cfg: RunConfig) -> int:
    """The last step that a run may have taken, by what it has left.

    Rows of metrics come at intervals: up to one of these the run may have gone on before it was stopped.
    """
    last = max(int(run.last_row().get("step", 0)), *run.steps(), 0)
    return min(last + cfg.train.log_interval - 1, cfg.train.total_steps)


def of_run(run: RunFolder, step: int | None, row: int | None, *, color: bool = False) -> str:
    """What a run has read in a step, from what its run.json says; without a step, what it reads."""
    info, cfg = run.info(), run.config()
    tokenizer, seed = load_tokenizer(cfg.data.tokenizer, begin_with_end=cfg.data.begin_with_end), cfg.train.seed
    source = open_source(cfg.data, tokenizer, split=cfg.data.split, seed=seed, align=cfg.model.alignment)
    if info.get("rows", source.identity) != source.identity:
        raise ConfigError(f"{run}: the data of --dataset {cfg.data.dataset} has changed since this run began; bring it back")
    rows = cfg.data.batch_size * cfg.train.grad_accum
    if step is None:
        read = passes(source.epochs(cfg.train.total_steps * rows))
        return f"{cfg.data.dataset}: {rows} rows of {cfg.data.seq_len} a step; {read or 'it never ends'}"
    if step > (last := _furthest(run, cfg)):
        raise ConfigError(f"--step {step}: this run has not come so far; by its metrics and checkpoints {last} is the most")
    return of_step(source, tokenizer, step, row, rows, seed, color=color)


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
    """Statistics of a prepared folder, whose files are checked; or one row of it;
    or a step of a run that reads it alone."""
    if not (folder / FILE).exists():
        raise ConfigError(f"{folder}: neither prepared data nor a run; give a folder that prepare or train has made")
    source = PreparedRows(folder, split)
    tokenizer = load_tokenizer(str(folder / "tokenizer") if (folder / "tokenizer").exists() else "bytes")
    if step is not None:
        if batch_size < 1 or grad_accum < 1 or seed < 0:
            raise ConfigError("--batch-size and --grad-accum must be at least 1 and --seed at least 0")
        return of_step(source, tokenizer, step, row, batch_size * grad_accum, seed, color=color)
    if row is None:
        return statistics(source.manifest, source)
    if not 0 <= row < len(source):
        raise ConfigError(f"--row {row}: split {split!r} has rows 0 to {len(source) - 1}")
    return show_row(f"row {row} of {split}", source[row], tokenizer, origins(source, row), color=color)


def statistics(manifest: Manifest, source: PreparedRows) -> str:
    recipe = manifest.recipe
    sample = source.take(np.linspace(0, len(source) - 1, min(len(source), 1000)).astype(int))
    pieces = sample.segments.max(axis=1)
    counts = sum(split.tokens for split in manifest.splits.values())
    return "\n".join(
        [
            manifest.summary(),
            f"{manifest.bytes / max(counts, 1):.2f} bytes a token; documents start at multiples of {recipe['align']}",
            f"documents a row: {pieces.mean():.1f} on average, at most {pieces.max()} (of {len(pieces):,} rows looked at)",
            f"tokenizer: {recipe['tokenizer']['vocab_size']:,} tokens, {recipe['tokenizer']['fingerprint'][:16]}",
            f"content {recipe['content'][:16]}, rows {manifest.identity[:16]}; every shard is as it was written",
        ]
    )
