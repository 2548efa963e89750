"""`python -m nash_mhc.generate DIR`: a model's folder -> text on the terminal, as it is made."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nash_mhc.config import kits
from nash_mhc.config.commands import OneLineParser, local_path, one_line_errors, run_path
from nash_mhc.config.kits import Generator, Registry
from nash_mhc.config.schema import ConfigError, check_field
from nash_mhc.storage.files import is_remote, to_path
from nash_mhc.storage.folders import check_model_folder

if TYPE_CHECKING:
    from nash_mhc.generate.decode import Loaded
    from nash_mhc.generate.prompts import Prompt

# flag -> (type, bounds as in the schema, default, help)
_OPTIONS = {
    "--max-tokens": (int, {"low": 1}, 400, "stop after this many new tokens"),
    "--temperature": (float, {"low": 0}, 0.8, "0 always takes the likeliest token, 1 draws as the model predicts"),
    "--top-k": (int, {"low": 0}, 0, "draw among this many of the likeliest tokens (0: all)"),
    "--top-p": (float, {"above": 0, "high": 1}, 1.0, "draw among the fewest tokens that have this probability together"),
    "--repetition-penalty": (float, {"above": 0}, 1.0, "above 1, tokens that have come before are drawn less (1: as others)"),
    "--seed": (int, {"low": 0, "high": 2**32 - 1}, 0, "the same seed gives the same text"),
    "--step": (int | None, {"low": 0}, None, "checkpoint to use (default: the one that the run ends with)"),
    "--batch-size": (int, {"low": 1}, 8, "prompts of --prompts that are answered at once"),
}
_SMALLEST_CACHE = 256  # tokens: programs are compiled for twice, four times ... as many


# What kits do with a model beside writing text, by flag.
GENERATORS: Registry[Generator] = Registry("generators", {})


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """ConfigError on any mistake; --help prints and exits with 0."""
    parser = OneLineParser(
        prog="python -m nash_mhc.generate", allow_abbrev=False, description="Writes text with a trained model."
    )
    parser.add_argument("folder", type=run_path, metavar="DIR", nargs="?", help="run directory or Hugging Face folder")
    parser.add_argument("--checkpoint-dir", type=run_path, metavar="DIR", help="the same as DIR")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="prompt (default: a new document)")
    parser.add_argument(
        "--prompts",
        type=local_path,
        metavar="FILE",
        help="file of prompts: one per line, or .jsonl with prompt or messages; writes JSON lines",
    )
    parser.add_argument("--out", type=local_path, metavar="FILE", help="output file for --prompts (default: stdout)")
    for name, generator in GENERATORS.items():
        parser.add_argument(f"--{name}", metavar=generator.metavar, help=generator.help)
    parser.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template to the prompt")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="stop before this text; repeatable")
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
    for name, texts in {"--prompt": [args.prompt], "--system": [args.system or ""], "--stop": args.stop}.items():
        try:
            [text.encode("utf-8") for text in texts]
        except UnicodeEncodeError:  # what the shell passed on were bytes that are no text
            raise ConfigError(f"{name} is not UTF-8 text") from None
    if "" in args.stop:
        raise ConfigError("--stop is empty: every text would end before it begins")
    if args.prompts and args.prompt:
        raise ConfigError("--prompt and --prompts are given; name one")
    if (special := _special(args)) and (other := [f"--{n}" for n in ("prompt", "prompts", "chat") if getattr(args, n)]):
        raise ConfigError(f"--{special} and {other[0]} are given; name one")
    if args.out and not args.prompts:
        raise ConfigError("--out is for the answers to --prompts; a single text goes where > sends it")
    if args.system is not None and not args.chat:
        raise ConfigError("--system begins a conversation: add --chat")
    return args


def _special(args: argparse.Namespace) -> str | None:
    """The flag of a kit that was given."""
    return next((name for name in GENERATORS if getattr(args, name) is not None), None)


def _say(text: str) -> None:
    """Beside the text, not in it: `generate > file` writes nothing but text."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    args = parse(sys.argv[1:])
    # After the flags: a typo is reported without JAX.
    from nash_mhc.generate.decode import load
    from nash_mhc.generate.prompts import Prompt, asked, read_prompts
    from nash_mhc.runtime.compiled import use_compilation_cache

    prompts = [asked(args.prompt, args.system) if args.chat else Prompt(args.prompt)]
    if args.prompts:
        prompts = read_prompts(Path(args.prompts), chat=args.chat, system=args.system)
    check_model_folder("", args.folder, "; the text to continue is --prompt")
    loaded = load(args.folder, args.step, say=_say)
    if is_remote(args.folder) or (Path(args.folder) / "run.json").exists():
        use_compilation_cache(to_path(args.folder))  # the sample that a run ends with has left the program there
    if special := _special(args):
        print(kits.load(GENERATORS[special].answer)(loaded, getattr(args, special)))
        return 0
    if args.prompts:
        return _answer_all(args, loaded, prompts)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows what it can
    try:
        pieces = _text(args, loaded, prompts[0])
        first = next(pieces, "")  # whatever is said before it comes above the text, not into its first line
        print(("" if args.chat else args.prompt) + first, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except BrokenPipeError:  # the reader (`head`, a pager) has seen enough; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _rows(
    args: argparse.Namespace,
    loaded: Loaded,
    prompts: Sequence[list[int]],
    is_done: Callable[[int], bool],
    say: Callable[[str], None] | None,
    at_once: int = 1,
) -> Iterator[tuple[int, int]]:
    from nash_mhc.generate.decode import Sampling, generate_rows

    longest = max(map(len, prompts)) + args.max_tokens
    room = _SMALLEST_CACHE
    while room < longest:
        room *= 2
    return generate_rows(
        loaded.model, prompts, Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty),
        seq_len=min(room, loaded.config.data.seq_len), ends=set(loaded.stops), max_tokens=args.max_tokens, seed=args.seed,
        dtype=loaded.dtype, at_once=at_once, is_done=is_done, say=say or (lambda text: None),
    )  # fmt: skip


def _text(args: argparse.Namespace, loaded: Loaded, prompt: Prompt) -> Iterator[str]:
    """The text after the prompt, piece by piece."""
    from nash_mhc.generate.decode import stream_text
    from nash_mhc.generate.prompts import up_to

    rows = _rows(args, loaded, [prompt.tokens(loaded.tokenizer)], lambda row: False, _say)
    return up_to(stream_text((token for _, token in rows), loaded.tokenizer), args.stop)


def _answer_all(args: argparse.Namespace, loaded: Loaded, prompts: Sequence[Prompt]) -> int:
    """A line of JSON for each prompt, in their order; how fast, at the end."""
    from nash_mhc.generate.decode import MANY

    try:
        out: TextIO = open(args.out, "w", encoding="utf-8") if args.out else sys.stdout  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: cannot be written ({error.strerror})") from None
    size, decode = min(args.batch_size, len(prompts)), lambda ids: loaded.tokenizer.decode(_array(ids))
    tokens, began = 0, 0.0
    for at in range(0, len(prompts), size):
        some = prompts[at : at + size]
        read = [prompt.tokens(loaded.tokenizer) for prompt in some]
        # As many rows as before, so that it is the same program; those that are too many end at once.
        done = set(range(len(some), size))
        made: list[list[int]] = [[] for _ in range(size)]
        rows = read + read[:1] * len(done)
        for row, token in _rows(args, loaded, rows, done.__contains__, _say if at == 0 else None, MANY):
            made[row].append(token)
            tokens += row < len(some)
            began = began or time.perf_counter()
            if args.stop and any(stop in decode(made[row]) for stop in args.stop):
                done.add(row)
        for row, prompt in enumerate(some):
            text = decode(made[row])
            text = text[: min([text.index(stop) for stop in args.stop if stop in text], default=len(text))]
            ended = row in done or len(made[row]) < args.max_tokens
            line = {"prompt": prompt.text, "text": text, "tokens": len(made[row]), "ended": ended}
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
        _say(f"{min(at + size, len(prompts))} of {len(prompts)} prompts")
    seconds = time.perf_counter() - began
    _say(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if args.out:
        out.close()
    return 0


def _array(ids: list[int]) -> Any:
    import numpy as np

    return np.array(ids, np.int32)


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
