"""`python -m nash_mhc.data prepare`: documents -> packed rows on disk; `inspect`: what is in them; `train-bpe`: a tokenizer."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nash_mhc.config.cli import parse
from nash_mhc.config.commands import OneLineParser, chosen_command, one_line_errors
from nash_mhc.config.places import place
from nash_mhc.config.schema import ConfigError, RunConfig

ABOUT = {
    "prepare": "reads, tokenizes and packs a dataset once, into a folder that train --dataset takes",
    "inspect": "statistics of a prepared folder, and the documents of a row of it or of a step of a run",
    "train-bpe": "trains a tokenizer on a dataset",
}
USAGE = f"python -m nash_mhc.data {' | '.join(ABOUT)} ..."


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
    print(f"{manifest.summary()}\nprepared in {own.out} in {time.monotonic() - began:.1f} s. Next:")
    print(f"  {_train_command(cfg, own.out, tokenizer.vocab_size)}")
    return 0


def inspect_command(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m nash_mhc.data inspect", allow_abbrev=False,
        description="Shows what a prepared folder holds, or what a run has read in a step (as metrics.jsonl counts them).",
    )  # fmt: skip
    parser.add_argument("folder", metavar="DIR", nargs="?", help="a prepared folder, or the folder of a run")
    parser.add_argument("--step", type=int, metavar="K", help="the documents of step K, counted from 1")
    parser.add_argument("--row", type=int, metavar="R", help="the documents of one row: of the split, or of the step")
    parser.add_argument("--split", help="split of a prepared folder [train]")
    for flag, default, text in (("batch-size", 8, "rows"), ("grad-accum", 1, "batches"), ("seed", 0, "seed")):
        about = f"{text} of a step of a run on a prepared folder [{default}]; a run's folder knows its own"
        parser.add_argument(f"--{flag}", type=int, default=None, metavar="N", help=about)
    args = parser.parse_strictly(argv, "name one folder")
    if not args.folder:
        raise ConfigError("the folder is missing; give a prepared folder or that of a run, such as runs/tiny-20260101-120000")
    from nash_mhc.data.inspection import of_prepared, of_run

    if args.step is not None and args.step < 1:
        raise ConfigError(f"--step must be at least 1, not {args.step}; steps are counted as in metrics.jsonl")
    given = {k: getattr(args, k) for k in ("batch_size", "grad_accum", "seed") if getattr(args, k) is not None}
    folder = place(args.folder)
    if (folder / "run.json").exists():
        if given or args.split:
            raise ConfigError(f"{folder}: is a run and has its own split, batch size and seed; give --step and --row only")
        text = of_run(folder, args.step, args.row)
    else:
        text = of_prepared(Path(args.folder), args.split or "train", args.step, args.row, **given)
    print(text)
    return 0


def _bpe_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", metavar="DIR", help="folder to write the tokenizer to (required)")
    group.add_argument("--vocab-size", type=int, metavar="N", default=8192, help="tokens of the vocabulary [8192]")


def train_bpe_command(argv: Sequence[str]) -> int:
    parsed = parse(argv, prog="python -m nash_mhc.data train-bpe", own=_bpe_flags)
    cfg, own = parsed.config, parsed.own
    if not own.out:
        raise ConfigError("--out is missing; name the folder for the tokenizer, such as --out tokenizers/notes")
    from nash_mhc.data.bpe import corpus_texts, train_bpe
    from nash_mhc.data.sources import open_corpus

    corpus = open_corpus(cfg.data)
    count = train_bpe(corpus_texts(cfg.data, corpus), own.vocab_size, Path(own.out), progress=sys.stderr.isatty())
    print(f"a tokenizer of {count:,} tokens is in {own.out}. Next:")
    words = ["--dataset", cfg.data.dataset, "--tokenizer", own.out, "--model-vocab-size", str(count)]
    print("  " + shlex.join(["python", "-m", "nash_mhc.train", *words]))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "prepare": prepare_command,
    "inspect": inspect_command,
    "train-bpe": train_bpe_command,
}


def main() -> int:
    if (chosen := chosen_command(ABOUT, USAGE)) is None:
        return 0
    command, argv = chosen
    return COMMANDS[command](argv)


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
