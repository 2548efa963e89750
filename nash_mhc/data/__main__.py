"""`python -m nash_mhc.data prepare`: documents -> packed rows on disk."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nash_mhc.config.cli import parse
from nash_mhc.config.commands import did_you_mean, one_line_errors
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.manifest import Manifest

ABOUT = {
    "prepare": "reads, tokenizes and packs a dataset once, into a folder that train --dataset takes",
}
USAGE = f"python -m nash_mhc.data {' | '.join(ABOUT)} ..."


def summary(manifest: Manifest) -> str:
    lines = [f"{manifest.bytes:,} bytes of text" + (f", {manifest.empty:,} empty documents left out" if manifest.empty else "")]
    for name, split in manifest.splits.items():
        lines.append(
            f"{name}: {split.documents:,} documents, {split.tokens:,} tokens that count, {split.rows:,} rows of "
            f"{manifest.recipe['seq_len']}, {manifest.padding(name):.1%} padding, {len(split.shards):,} shards"
        )
    return "\n".join(lines)


def _prepare_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", metavar="DIR", help="folder to prepare into (required)")
    group.add_argument("--workers", type=int, metavar="N", default=0, help="processes (0: as many as there are cores)")


def _train_command(cfg: RunConfig, out: str, vocab_size: int) -> str:
    words = ["python", "-m", "nash_mhc.train", "--dataset", out]
    words += ["--model-size", cfg.model_size] if cfg.model_size != RunConfig.model_size else []
    words += ["--seq-len", str(cfg.data.seq_len)]
    if (Path(out) / "tokenizer").exists():
        words += ["--tokenizer", f"{out}/tokenizer"]
    if vocab_size > cfg.model.vocab_size:
        words += ["--model-vocab-size", str(vocab_size)]
    return shlex.join(words)


def prepare_command(argv: Sequence[str]) -> int:
    parsed = parse(argv, prog="python -m nash_mhc.data prepare", own=_prepare_flags)
    cfg, own = parsed.config, parsed.own
    if not own.out:
        raise ConfigError("--out is missing; name the folder to prepare into, such as --out data/notes")
    if own.workers < 0:
        raise ConfigError(f"--workers must be at least 0, not {own.workers}")
    # After the flags: a typo is told at once.
    from nash_mhc.data.prepare import prepare
    from nash_mhc.data.progress import watching
    from nash_mhc.data.sources import open_corpus
    from nash_mhc.data.tokens import load_tokenizer

    tokenizer, began = load_tokenizer(cfg.data.tokenizer), time.monotonic()
    corpus = open_corpus(cfg.data)
    with watching(f"preparing {cfg.data.dataset}") as watch:
        manifest = prepare(
            cfg.data,
            tokenizer,
            corpus,
            Path(own.out),
            align=cfg.model.coarsest_stride,
            workers=own.workers or None,
            watch=watch,
        )
    print(f"{summary(manifest)}\nprepared in {own.out} in {time.monotonic() - began:.1f} s. Next:")
    print(f"  {_train_command(cfg, own.out, tokenizer.vocab_size)}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"prepare": prepare_command}


def main() -> int:
    command, *argv = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        print(f"usage: {USAGE}\n", *(f"  {name:<10}{about}" for name, about in ABOUT.items()), sep="\n")
        print("\n--help behind one of these names lists its flags.")
        return 0
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}{did_you_mean(command, ABOUT)}; there are: {USAGE}")
    return COMMANDS[command](argv)


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
