"""`python -m nash_mhc.generate DIR`: a run's folder -> text on the terminal, as it is made."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from nash_mhc.config.commands import OneLineParser, one_line_errors
from nash_mhc.config.schema import ConfigError, check_field
from nash_mhc.storage.paths import place

# flag -> (type, bounds as in the schema, default, help)
_OPTIONS = {
    "--max-tokens": (int, {"low": 1}, 400, "stop after this many new tokens"),
    "--temperature": (float, {"low": 0}, 0.8, "0 always takes the likeliest token, 1 draws as the model predicts"),
    "--top-k": (int, {"low": 0}, 0, "draw among this many of the likeliest tokens (0: all)"),
    "--top-p": (float, {"above": 0, "high": 1}, 1.0, "draw among the fewest tokens that have this probability together"),
    "--seed": (int, {"low": 0, "high": 2**32 - 1}, 0, "the same seed gives the same text"),
    "--step": (int | None, {"low": 0}, None, "checkpoint to use (default: the last)"),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """ConfigError on any mistake; --help prints and exits with 0."""
    parser = OneLineParser(
        prog="python -m nash_mhc.generate", allow_abbrev=False, description="Writes text with a trained model."
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", help="folder of the run")
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="the same, by the name that train has for it")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to go on from (default: a new document)")
    for flag, (kind, _, default, text) in _OPTIONS.items():
        note = "" if default is None else f" [{default}]"
        convert = float if kind is float else int
        parser.add_argument(flag, type=convert, default=default, metavar=convert.__name__.upper(), help=text + note)
    args = parser.parse_strictly(argv, "the text to go on from is --prompt {word!r}")
    if args.folder and args.checkpoint_dir:
        raise ConfigError(f"two folders are given, {args.folder} and {args.checkpoint_dir}; name one")
    args.folder = args.folder or args.checkpoint_dir
    if not args.folder:
        raise ConfigError("which run? Give its folder: python -m nash_mhc.generate runs/tiny-20260101-120000")
    for flag, (kind, bounds, _, _) in _OPTIONS.items():
        check_field(flag, getattr(args, flag[2:].replace("-", "_")), kind, bounds)
    try:
        args.prompt.encode("utf-8")
    except UnicodeEncodeError:  # what the shell passed on were bytes that are no text
        raise ConfigError("--prompt is not UTF-8 text") from None
    return args


def main() -> int:
    args = parse(sys.argv[1:])
    from nash_mhc.generate.decode import generate_tokens, load, stream_text  # after the flags: a typo is reported without JAX
    from nash_mhc.runtime.program_cache import use_compilation_cache

    # Beside the text, not in it: `generate > file` writes nothing but text.
    say = lambda text: print(text, file=sys.stderr, flush=True)
    loaded = load(args.folder, args.step, say=say)
    use_compilation_cache(place(args.folder))  # the sample that a run ends with has left the program there
    tokenizer = loaded.tokenizer
    prompt = [tokenizer.begin]  # every document that the model has read began so
    for unit in tokenizer.split_special(args.prompt):  # as in a template, which the prompt may have to repeat
        prompt += [unit] if isinstance(unit, int) else tokenizer.encode(unit).tolist()
    tokens = generate_tokens(
        loaded.model, prompt, seq_len=loaded.config.data.seq_len, end=tokenizer.end,
        max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed,
        dtype=loaded.dtype, say=say,
    )  # fmt: skip
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows what it can
    try:
        pieces = stream_text(tokens, tokenizer)
        first = next(pieces, "")  # whatever is said before it comes above the text, not into its first line
        print(args.prompt + first, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except BrokenPipeError:  # the reader (`head`, a pager) has seen enough; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
