"""`python -m nash_mhc.generate DIR`: generate text with a trained model."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nash_mhc.config import kits, logs
from nash_mhc.config.commands import OneLineParser, local_path, one_line_errors, run_path
from nash_mhc.config.kits import Generator, Registry
from nash_mhc.config.schema import ConfigError, check_field
from nash_mhc.storage.files import is_remote, to_path
from nash_mhc.storage.folders import check_model_folder

if TYPE_CHECKING:
    from nash_mhc.generate.prompts import Prompt
    from nash_mhc.loading.load import Loaded

log = logging.getLogger(__name__)

# flag -> (type, bounds, default, help)
_OPTIONS = {
    "--max-tokens": (int, {"low": 1}, 400, "maximum number of new tokens"),
    "--temperature": (float, {"low": 0}, 0.8, "sampling temperature; 0 is greedy decoding"),
    "--top-k": (int, {"low": 0}, 0, "sample from the k most likely tokens; 0: all"),
    "--top-p": (float, {"above": 0, "high": 1}, 1.0, "sample from the fewest tokens with this total probability"),
    "--repetition-penalty": (float, {"above": 0}, 1.0, "penalty for tokens that occur in the text so far; 1: none"),
    "--seed": (int, {"low": 0, "high": 2**32 - 1}, 0, "random seed"),
    "--step": (int | None, {"low": 0}, None, "checkpoint to use (default: the run's final one)"),
    "--batch-size": (int, {"low": 1}, 8, "number of prompts to process together, with --prompts"),
}
_SMALLEST_CACHE = 256  # tokens; larger caches are powers of 2, so that few programs are compiled

GENERATORS: Registry[Generator] = Registry("generators", {})  # flag -> what a kit does with a model instead


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; raise ConfigError for any mistake."""
    parser = OneLineParser(
        prog="python -m nash_mhc.generate", allow_abbrev=False, description="Generate text with a trained model."
    )
    parser.add_argument("folder", type=run_path, metavar="DIR", nargs="?", help="run directory or Hugging Face folder")
    parser.add_argument("--checkpoint-dir", type=run_path, metavar="DIR", help="the same as DIR")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="prompt (default: a new document)")
    parser.add_argument(
        "--prompts",
        type=local_path,
        metavar="FILE",
        help="file of prompts, one per line, or .jsonl with `prompt` or `messages`; the output is JSON lines",
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
    logs.add_flag(parser)
    args = parser.parse_strictly(argv, "give the prompt with --prompt {word!r}")
    if args.folder and args.checkpoint_dir:
        raise ConfigError(f"give one folder, not both {args.folder} and {args.checkpoint_dir}")
    args.folder = args.folder or args.checkpoint_dir
    if not args.folder:
        raise ConfigError("no folder given; for example: python -m nash_mhc.generate runs/tiny-20260101-120000")
    for flag, (kind, bounds, _, _) in _OPTIONS.items():
        check_field(flag, getattr(args, flag[2:].replace("-", "_")), kind, bounds)
    for name, texts in {"--prompt": [args.prompt], "--system": [args.system or ""], "--stop": args.stop}.items():
        try:
            [text.encode("utf-8") for text in texts]
        except UnicodeEncodeError:  # the shell passed bytes that are not UTF-8
            raise ConfigError(f"{name} is not UTF-8 text") from None
    if "" in args.stop:
        raise ConfigError("--stop is empty; give the text to stop before")
    if args.prompts and args.prompt:
        raise ConfigError("--prompt cannot be combined with --prompts; leave out one of them")
    if (special := _kit_flag(args)) and (other := [f"--{n}" for n in ("prompt", "prompts", "chat") if getattr(args, n)]):
        raise ConfigError(f"--{special} cannot be combined with {other[0]}; leave out one of them")
    if args.out and not args.prompts:
        raise ConfigError("--out needs --prompts; redirect a single text with > FILE")
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat")
    return args


def _kit_flag(args: argparse.Namespace) -> str | None:
    """Return the flag of a kit that was given."""
    return next((name for name in GENERATORS if getattr(args, name) is not None), None)


def main() -> int:
    args = parse(sys.argv[1:])
    logs.configure(args.log_level)
    # JAX is not imported before the flags are checked.
    from nash_mhc.generate.prompts import Prompt, chat_prompt, read_prompts
    from nash_mhc.loading.load import load
    from nash_mhc.runtime.compiled import use_compilation_cache

    prompts = [chat_prompt(args.prompt, args.system) if args.chat else Prompt(args.prompt)]
    if args.prompts:
        prompts = read_prompts(Path(args.prompts), chat=args.chat, system=args.system)
    hint = "" if args.prompt or args.prompts else "; give the text to continue with --prompt"
    check_model_folder("", args.folder, hint)
    loaded = load(args.folder, args.step)
    if is_remote(args.folder) or (Path(args.folder) / "run.json").exists():
        use_compilation_cache(to_path(args.folder))  # has the program of the run's samples
    if flag := _kit_flag(args):
        print(kits.load(GENERATORS[flag].answer)(loaded, getattr(args, flag)))
        return 0
    if args.prompts:
        return _answer_all(args, loaded, prompts)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without Unicode
    try:
        pieces = _stream(args, loaded, prompts[0])
        first = next(pieces, "")  # before the prompt is printed, because compilation prints lines
        print(("" if args.chat else args.prompt) + first, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except BrokenPipeError:  # the reader (`head`, a pager) closed the pipe; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _generate(
    args: argparse.Namespace,
    loaded: Loaded,
    prompts: Sequence[list[int]],
    is_done: Callable[[int], bool],
    at_once: int = 1,
) -> Iterator[tuple[int, int]]:
    """Yield (row, token) as tokens are generated."""
    from nash_mhc.model.sampling import Sampling, generate_rows

    longest = max(map(len, prompts)) + args.max_tokens
    capacity = max(_SMALLEST_CACHE, 1 << (longest - 1).bit_length())
    return generate_rows(
        loaded.model, prompts, Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty),
        seq_len=min(capacity, loaded.config.data.seq_len), ends=set(loaded.stops), max_tokens=args.max_tokens, seed=args.seed,
        dtype=loaded.dtype, at_once=at_once, is_done=is_done,
    )  # fmt: skip


def _stream(args: argparse.Namespace, loaded: Loaded, prompt: Prompt) -> Iterator[str]:
    """Yield the generated text piece by piece."""
    from nash_mhc.data.tokenizer import stream_text
    from nash_mhc.generate.prompts import before_stop

    log.info("compiling ...")
    rows = _generate(args, loaded, [prompt.tokens(loaded.tokenizer)], lambda row: False)
    return before_stop(stream_text((token for _, token in rows), loaded.tokenizer), args.stop)


def _answer_all(args: argparse.Namespace, loaded: Loaded, prompts: Sequence[Prompt]) -> int:
    """Write a line of JSON per prompt, in order, then report the speed."""
    import numpy as np

    from nash_mhc.model.sampling import MANY

    try:
        out: TextIO = open(args.out, "w", encoding="utf-8") if args.out else sys.stdout  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: cannot be written ({error.strerror})") from None
    size, decode = min(args.batch_size, len(prompts)), lambda ids: loaded.tokenizer.decode(np.array(ids, np.int32))
    count, start = 0, 0.0
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        tokens = [prompt.tokens(loaded.tokenizer) for prompt in batch]
        # A last, smaller batch is filled up to the compiled size with rows that end at once.
        stopped = set(range(len(batch), size))
        tokens += tokens[:1] * len(stopped)
        generated: list[list[int]] = [[] for _ in range(size)]
        if first == 0:
            log.info("compiling ...")
        for row, token in _generate(args, loaded, tokens, stopped.__contains__, MANY):
            generated[row].append(token)
            count += row < len(batch)
            start = start or time.perf_counter()  # after compilation
            if args.stop and any(stop in decode(generated[row]) for stop in args.stop):
                stopped.add(row)
        for row, prompt in enumerate(batch):
            text = decode(generated[row])
            text = text[: min([text.index(stop) for stop in args.stop if stop in text], default=len(text))]
            ended = row in stopped or len(generated[row]) < args.max_tokens
            line = {"prompt": prompt.text, "text": text, "tokens": len(generated[row]), "ended": ended}
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
        log.info(f"{min(first + size, len(prompts))} of {len(prompts)} prompts")
    seconds = time.perf_counter() - start
    log.info(f"{count:,} tokens in {seconds:.1f} s, {count / max(seconds, 1e-9):,.0f} tokens/s")
    if args.out:
        out.close()
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
