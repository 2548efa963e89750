"""`python -m nash_mhc.data prepare`: documents -> packed rows on disk; `inspect`: what is in them; `train-bpe`:
a tokenizer; `questions`: a small set to fine-tune on."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nash_mhc.checkpoint.run_folder import RUN, RunFolder
from nash_mhc.config.commands import OneLineParser, chosen_command, local_path, module_command, one_line_errors, run_path
from nash_mhc.config.parsing import Settings, as_flags, parse, shown
from nash_mhc.config.schema import ConfigError

ABOUT = {
    "prepare": "reads, tokenizes and packs a dataset once, into a folder that train --dataset takes",
    "inspect": "statistics of a prepared folder, and the documents of a row of it or of a step of a run",
    "train-bpe": "trains a tokenizer on a dataset",
    "questions": "writes questions about stories, with their answers: an example to fine-tune on",
}
USAGE = f"python -m nash_mhc.data {' | '.join(ABOUT)} ..."


def _prepare_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=local_path, metavar="DIR", help="folder to prepare into (required)")
    group.add_argument("--workers", type=int, metavar="N", default=0, help="processes (0: one per core)")


def _train_command(given: Mapping[str, Any], **instead: Any) -> str:
    """The run that these settings are meant for."""
    settings = {"data.dataset": None, **given, **{f"data.{name}": value for name, value in instead.items()}}
    return module_command("nash_mhc.train", *as_flags(settings))


def _given_out(own: argparse.Namespace, example: str) -> Path:
    if not own.out:
        raise ConfigError(f"--out is missing; name the folder to make, such as --out {example}")
    return Path(own.out).expanduser()


def _of_tokenizer(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    """Of the tokenizer of a Hugging Face model: documents begin with what it adds by itself, if anything."""
    from nash_mhc.data.begin_token import is_of_model

    name = values["data.tokenizer"]
    return {"data.begin_with_end": (False, f"tokenizer {name}")} if is_of_model(name) else {}


def prepare_command(argv: Sequence[str]) -> int:
    parsed = parse(argv, prog="python -m nash_mhc.data prepare", own=_prepare_flags, found=_of_tokenizer)
    if shown(parsed):
        return 0
    cfg, own, out = parsed.config, parsed.own, _given_out(parsed.own, "data/notes")
    if own.workers < 0:
        raise ConfigError(f"--workers must be at least 0, not {own.workers}")
    # After the flags: a typo is reported at once.
    from nash_mhc.data.prepared.prepare import prepare
    from nash_mhc.data.prepared.progress import watching
    from nash_mhc.data.recipe import make_recipe
    from nash_mhc.data.sources import open_corpus
    from nash_mhc.data.tokenizer import load_tokenizer

    tokenizer, began = load_tokenizer(cfg.data.tokenizer, begin_with_end=cfg.data.begin_with_end), time.monotonic()
    corpus = open_corpus(cfg.data)
    with watching(f"preparing {cfg.data.dataset}") as watch:
        recipe = make_recipe(cfg.data, tokenizer, corpus, cfg.model.alignment)
        manifest = prepare(recipe, tokenizer, corpus, out, dataset=cfg.data.dataset, workers=own.workers or None, watch=watch)
    print(f"{manifest.summary()}\nprepared in {out} in {time.monotonic() - began:.1f} s. Next:")
    # The folder knows all about its rows.
    kept = ("data.batch_size", "data.num_workers", "data.worker_buffer_size")
    others = {k: v for k, v in parsed.given.items() if not k.startswith("data.") or k in kept}
    print(f"  {_train_command(others, dataset=str(out))}")
    return 0


def inspect_command(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m nash_mhc.data inspect", allow_abbrev=False,
        description="Shows what a prepared folder holds, or what a run has read in a step (as metrics.jsonl counts them).",
    )  # fmt: skip
    parser.add_argument("folder", type=run_path, metavar="DIR", nargs="?", help="prepared folder or run directory")
    parser.add_argument("--step", type=int, metavar="K", help="show the documents of step K, counted from 1")
    parser.add_argument("--row", type=int, metavar="R", help="show the documents of one sequence of the split or step")
    parser.add_argument("--split", help="split of a prepared folder [train]")
    for flag, default, text in (("batch-size", 8, "rows"), ("grad-accum", 1, "batches"), ("seed", 0, "seed")):
        about = f"{text} of a step of a run on a prepared folder [{default}]; a run's folder knows its own"
        parser.add_argument(f"--{flag}", type=int, default=None, metavar="N", help=about)
    about = "what counts in the loss is green, not the rest in [[ ]]; auto: on a terminal, unless NO_COLOR is set [auto]"
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=about)
    args = parser.parse_strictly(argv, "name one folder")
    if not args.folder:
        raise ConfigError("the folder is missing; give a prepared folder or that of a run, such as runs/tiny-20260101-120000")
    from nash_mhc.data.inspection import of_prepared, of_run

    if args.step is not None and args.step < 1:
        raise ConfigError(f"--step must be at least 1, not {args.step}; steps are counted as in metrics.jsonl")
    given = {k: getattr(args, k) for k in ("batch_size", "grad_accum", "seed") if getattr(args, k) is not None}
    # https://no-color.org: any value but an empty one; what is said on the command line goes before.
    color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    run = RunFolder(args.folder)
    if (run.path / RUN).exists():
        if given or args.split:
            raise ConfigError(f"{run}: is a run and has its own split, batch size and seed; give --step and --row only")
        text = of_run(run, args.step, args.row, color=color)
    else:
        folder = Path(args.folder).expanduser()
        text = of_prepared(folder, args.split or "train", args.step, args.row, **given, color=color)
    print(text)
    return 0


def _bpe_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=local_path, metavar="DIR", help="folder to write the tokenizer to (required)")
    group.add_argument("--vocab-size", type=int, metavar="N", default=8192, help="vocabulary size [8192]")


def train_bpe_command(argv: Sequence[str]) -> int:
    parsed = parse(argv, prog="python -m nash_mhc.data train-bpe", own=_bpe_flags)
    if shown(parsed):
        return 0
    cfg, own, out = parsed.config, parsed.own, _given_out(parsed.own, "tokenizers/notes")
    from nash_mhc.data.sources import open_corpus, parts_of
    from nash_mhc.data.train_bpe import corpus_texts, train_bpe

    parts = [part for part, _ in parts_of(cfg.data)] or [cfg.data]  # of a mixture, all text of every part
    texts = [corpus_texts(part, open_corpus(part)) for part in parts]
    count = train_bpe(itertools.chain.from_iterable(texts), own.vocab_size, out, progress=sys.stderr.isatty())
    print(f"a tokenizer of {count:,} tokens is in {out}. Next:")
    print(f"  {_train_command(parsed.given, dataset=cfg.data.dataset, tokenizer=str(out))}")
    return 0


def questions_command(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m nash_mhc.data questions", allow_abbrev=False,
        description="Writes questions about stories: question, answer, topic, difficulty, reasoning, case_citation.",
    )  # fmt: skip
    parser.add_argument("--out", type=local_path, metavar="FILE", help="JSONL file to write (required)")
    parser.add_argument("--count", type=int, metavar="N", default=4000, help="number of questions [4000]")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="random seed [0]")
    args = parser.parse_strictly(argv, "the file to write is --out {word}")
    out = _given_out(args, "questions.jsonl")
    if args.count < 1:
        raise ConfigError(f"--count must be at least 1, not {args.count}")
    from nash_mhc.data.stories.corpus import write_questions

    write_questions(out, args.count, args.seed)
    print(f"{args.count:,} questions are in {out}; docs/fine-tuning.md goes on from there")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "prepare": prepare_command,
    "inspect": inspect_command,
    "train-bpe": train_bpe_command,
    "questions": questions_command,
}


def main() -> int:
    if (chosen := chosen_command(ABOUT, USAGE)) is None:
        return 0
    command, argv = chosen
    return COMMANDS[command](argv)


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
