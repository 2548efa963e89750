"""`python -m nash_mhc.data`: prepare datasets, inspect them, train tokenizers, write example questions."""

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
from nash_mhc.config import logs
from nash_mhc.config.commands import OneLineParser, chosen_command, local_path, module_command, one_line_errors, run_path
from nash_mhc.config.parsing import Settings, as_flags, parse, shown
from nash_mhc.config.schema import ConfigError

ABOUT = {
    "prepare": "read, tokenize and pack a dataset into a folder for train --dataset",
    "inspect": "show statistics of a prepared folder, or the documents of a sequence or a training step",
    "train-bpe": "train a BPE tokenizer on a dataset",
    "questions": "write questions and answers about synthetic stories, as example data for fine-tuning",
}
USAGE = f"python -m nash_mhc.data {' | '.join(ABOUT)} ..."
_PREPARE_EXAMPLES = (
    "--dataset notes/ --out data/notes",
    "--dataset qa.jsonl --test-fraction 0.1 --model-size small --seq-len 1024 --out data/qa",
)
_BPE_EXAMPLES = ("--dataset notes/ --vocab-size 8192 --out tokenizers/notes",)


def _prepare_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=local_path, metavar="DIR", help="output folder (required)")
    group.add_argument("--workers", type=int, metavar="N", default=0, help="number of processes; 0: one per core [0]")


def _train_command(given: Mapping[str, Any], **data: Any) -> str:
    """Return the training command with these settings, with some of `data.` replaced."""
    settings = {"data.dataset": None, **given, **{f"data.{name}": value for name, value in data.items()}}
    return module_command("nash_mhc.train", *as_flags(settings))


def _required_out(own: argparse.Namespace, example: str) -> Path:
    if not own.out:
        raise ConfigError(f"--out is missing; add an output path, such as --out {example}")
    return Path(own.out).expanduser()


def _tokenizer_settings(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    """Documents for a Hugging Face model begin with the token that its tokenizer adds, if any."""
    from nash_mhc.data.tokenizer import is_of_model

    name = values["data.tokenizer"]
    return {"data.begin_with_end": (False, f"tokenizer {name}")} if is_of_model(name) else {}


def prepare_command(argv: Sequence[str]) -> int:
    parsed = parse(
        argv, prog="python -m nash_mhc.data prepare", own=_prepare_flags, found=_tokenizer_settings, examples=_PREPARE_EXAMPLES
    )
    if shown(parsed):
        return 0
    logs.configure(parsed.config.telemetry.log_level)
    cfg, own, out = parsed.config, parsed.own, _required_out(parsed.own, "data/notes")
    if own.workers < 0:
        raise ConfigError(f"--workers must be at least 0, not {own.workers}")
    # Imported late, so that typos are reported at once.
    from nash_mhc.data.prepared.prepare import prepare
    from nash_mhc.data.recipe import make_recipe
    from nash_mhc.data.sources import open_corpus
    from nash_mhc.data.tokenizer import load_tokenizer
    from nash_mhc.data.workers import progress

    tokenizer, start = load_tokenizer(cfg.data.tokenizer, begin_with_end=cfg.data.begin_with_end), time.monotonic()
    corpus = open_corpus(cfg.data)
    with progress(f"preparing {cfg.data.dataset}") as report:
        recipe = make_recipe(cfg.data, tokenizer, corpus, cfg.model.alignment)
        manifest = prepare(recipe, tokenizer, corpus, out, dataset=cfg.data.dataset, workers=own.workers or None, report=report)
    print(f"{manifest.summary()}\nprepared in {out} in {time.monotonic() - start:.1f} s. Next:")
    # The other data settings are in the manifest.
    loading = ("data.batch_size", "data.num_workers", "data.worker_buffer_size")
    others = {k: v for k, v in parsed.given.items() if not k.startswith("data.") or k in loading}
    print(f"  {_train_command(others, dataset=str(out))}")
    return 0


def inspect_command(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m nash_mhc.data inspect", allow_abbrev=False,
        description="Show the content of a prepared folder, or the documents that a run read in a training step.",
    )  # fmt: skip
    parser.add_argument("folder", type=run_path, metavar="DIR", nargs="?", help="prepared folder or run directory")
    parser.add_argument(
        "--step", type=int, metavar="K", help="show the documents of training step K, counted from 1 as in metrics.jsonl"
    )
    parser.add_argument("--row", type=int, metavar="R", help="show one sequence of the split or step")
    parser.add_argument("--split", help="split of a prepared folder [train]")
    for flag, default, text in (("batch-size", 8, "batch size"), ("grad-accum", 1, "microbatches"), ("seed", 0, "seed")):
        about = f"{text} of the run, for --step on a prepared folder [{default}]"
        parser.add_argument(f"--{flag}", type=int, default=None, metavar="N", help=about)
    about = (
        "always: color text that counts in the loss green; never: mark other text with [[ ]]; auto: color if stdout is a "
        "terminal and NO_COLOR is unset [auto]"
    )
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=about)
    args = parser.parse_strictly(argv, "give only one folder")
    if not args.folder:
        raise ConfigError("no folder given; add a prepared folder or a run directory, such as runs/tiny-20260101-120000")
    from nash_mhc.data.inspection import of_prepared, of_run

    if args.step is not None and args.step < 1:
        raise ConfigError(f"--step must be at least 1, not {args.step}; steps are counted as in metrics.jsonl")
    given = {k: getattr(args, k) for k in ("batch_size", "grad_accum", "seed") if getattr(args, k) is not None}
    # https://no-color.org: any value but an empty one; the flag takes precedence.
    color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    run = RunFolder(args.folder)
    if (run.path / RUN).exists():
        if given or args.split:
            raise ConfigError(f"{run}: is a run, whose split, batch size and seed are recorded; give only --step and --row")
        text = of_run(run, args.step, args.row, color=color)
    else:
        folder = Path(args.folder).expanduser()
        text = of_prepared(folder, args.split or "train", args.step, args.row, **given, color=color)
    print(text)
    return 0


def _bpe_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=local_path, metavar="DIR", help="output folder (required)")
    group.add_argument("--vocab-size", type=int, metavar="N", default=8192, help="vocabulary size [8192]")


def train_bpe_command(argv: Sequence[str]) -> int:
    parsed = parse(argv, prog="python -m nash_mhc.data train-bpe", own=_bpe_flags, examples=_BPE_EXAMPLES)
    if shown(parsed):
        return 0
    logs.configure(parsed.config.telemetry.log_level)
    cfg, own, out = parsed.config, parsed.own, _required_out(parsed.own, "tokenizers/notes")
    from nash_mhc.data.recipe import corpus_texts
    from nash_mhc.data.sources import open_corpus, parts_of
    from nash_mhc.data.tokenizer import train_bpe

    parts = [part for part, _ in parts_of(cfg.data)] or [cfg.data]
    texts = [corpus_texts(part, open_corpus(part)) for part in parts]
    count = train_bpe(itertools.chain.from_iterable(texts), own.vocab_size, out, show_progress=sys.stderr.isatty())
    print(f"wrote a tokenizer of {count:,} tokens to {out}. Next:")
    print(f"  {_train_command(parsed.given, dataset=cfg.data.dataset, tokenizer=str(out))}")
    return 0


def questions_command(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m nash_mhc.data questions", allow_abbrev=False,
        description="Write questions about synthetic stories as JSON lines. Fields: question, answer, topic, difficulty, "
        "reasoning and case_citation (sometimes empty).",
    )  # fmt: skip
    parser.add_argument("--out", type=local_path, metavar="FILE", help="output JSONL file (required)")
    parser.add_argument("--count", type=int, metavar="N", default=4000, help="number of questions [4000]")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="random seed [0]")
    args = parser.parse_strictly(argv, "the file to write is --out {word}")
    out = _required_out(args, "questions.jsonl")
    if args.count < 1:
        raise ConfigError(f"--count must be at least 1, not {args.count}")
    from nash_mhc.data.stories import write_questions

    write_questions(out, args.count, args.seed)
    print(f"wrote {args.count:,} questions to {out}. Next: see docs/fine-tuning.md")
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
