"""`python -m nash_mhc.distill`: cache a teacher's logits, or run a chain."""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nash_mhc.config import logs
from nash_mhc.config.commands import OneLineParser, chosen_command, local_path, module_command, run_path
from nash_mhc.config.parsing import parse, shown
from nash_mhc.config.schema import ConfigError, DataConfig

if TYPE_CHECKING:
    from nash_mhc.kits.distill.cache import CacheSettings

log = logging.getLogger(__name__)
ABOUT = {
    "cache": "run a teacher over a dataset and store its top-k logits for train --objective distill",
    "chain": "train a teacher, cache its logits and train the stages of a student, as listed in a YAML file",
}
USAGE = f"python -m nash_mhc.distill {' | '.join(ABOUT)} ..."


def cache_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--teacher", type=run_path, metavar="DIR", help="run directory or Hugging Face folder (required)")
    group.add_argument("--teacher-step", type=int, metavar="INT", help="checkpoint of the teacher [its final one]")
    group.add_argument(
        "--out", type=local_path, metavar="DIR", help="folder to create for the sequences and the teacher's logits (required)"
    )
    group.add_argument("--top-k", type=int, default=128, metavar="K", help="top logits to cache per position [128]")
    group.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="R",
        help="random tokens to cache per position, in addition to the top K [0]",
    )
    group.add_argument("--temperatures", default="1", metavar="T,T", help="softmax temperatures that students may use [1]")


def _settings(own: argparse.Namespace, batch_size: int, vocab_size: int) -> CacheSettings:
    """Return the checked settings of the cache; may raise ConfigError."""
    from nash_mhc.kits.distill.cache import CacheSettings

    if own.top_k < 1:
        raise ConfigError(f"--top-k must be at least 1, not {own.top_k}")
    if own.random < 0:
        raise ConfigError(f"--random must be at least 0, not {own.random}")
    try:
        temperatures = tuple(float(word) for word in own.temperatures.split(","))
    except ValueError:
        temperatures = ()
    if not temperatures or not all(t > 0 and math.isfinite(t) for t in temperatures):
        raise ConfigError(f"--temperatures {own.temperatures}: must be comma-separated numbers above 0, such as 1,2")
    top_k = min(own.top_k, vocab_size)
    if own.random and top_k == vocab_size:
        raise ConfigError(
            f"--random {own.random}: --top-k {own.top_k} covers all {vocab_size} tokens; leave out --random or lower --top-k"
        )
    return CacheSettings(top_k, own.random, temperatures, batch_size)


def cache_command(argv: Sequence[str]) -> int:
    examples = ("--teacher runs/teacher --dataset notes/ --out data/notes-teacher",)
    parsed = parse(argv, prog="python -m nash_mhc.distill cache", own=cache_flags, examples=examples)
    if shown(parsed):
        return 0
    cfg, own = parsed.config, parsed.own
    logs.configure(cfg.telemetry.log_level)
    for flag, value, example in (("--teacher", own.teacher, "runs/teacher"), ("--out", own.out, "data/stories-teacher")):
        if not value:
            raise ConfigError(f"{flag} is missing; name a folder, such as {flag} {example}")
    out = Path(own.out).expanduser()
    _settings(own, 1, 1 << 30)  # check the flags first: the imports take seconds
    import jax

    from nash_mhc.data.prepared.folder import Manifest
    from nash_mhc.data.workers import progress
    from nash_mhc.kits.distill.cache import cache_size, check_disk_space, write_cache
    from nash_mhc.loading.load import load
    from nash_mhc.loading.weights import find_record
    from nash_mhc.parallel.board import leader_first
    from nash_mhc.parallel.mesh import check_fit, describe, make_mesh
    from nash_mhc.runtime.compiled import use_compilation_cache
    from nash_mhc.train.inputs import join

    join(cfg, **vars(own))  # before anything else uses jax
    mesh = make_mesh(cfg.mesh)
    if jax.process_index() > 0:
        logs.silence()
    record = find_record("--teacher", own.teacher, own.teacher_step, hashed=True)
    loaded = load(own.teacher, own.teacher_step, mesh=mesh)
    check_fit(cfg.data, loaded.config.model, mesh.shape, resizable=())
    leader_first(lambda: _prepare(cfg.data, cfg.model.alignment, loaded, out, "data.tokenizer" in parsed.given))
    settings = _settings(own, cfg.data.batch_size, loaded.tokenizer.vocab_size)
    rows, needed = cache_size(out, settings)
    check_disk_space(out, needed)
    log.info(f"{describe(mesh)}; {rows:,} sequences, {needed / 1e6:,.1f} MB will be in {out}; compiling ...")
    use_compilation_cache(out.parent)
    began, done = time.monotonic(), 0
    seq_len = Manifest.read(out).recipe["seq_len"]
    with progress(f"{own.teacher} reads") as watch:

        def tick(read: int) -> None:
            nonlocal done
            done += read
            watch(done, rows, done * seq_len)

        teacher = {k: v for k, v in record.items() if k != "folder"}  # the hash identifies it, wherever it is
        write_cache(out, loaded, teacher, mesh, settings, tick)
    if jax.process_index() == 0:
        print(
            f"{out}: {rows:,} sequences with {settings.top_k} tokens per position, in {time.monotonic() - began:.1f} s. Next:"
        )
        command = module_command("nash_mhc.train", "runs/student", "--dataset", str(out), "--objective", "distill")
        print(f"  {command}")
    return 0


def _prepare(cfg: DataConfig, alignment: int, loaded: Any, out: Path, has_tokenizer: bool) -> None:
    """Prepare the dataset in `out`, or copy a prepared folder there.

    Raise ConfigError if it does not fit the teacher.
    """
    from nash_mhc.data.prepared.folder import FILE, Manifest
    from nash_mhc.data.prepared.prepare import prepare
    from nash_mhc.data.recipe import make_recipe
    from nash_mhc.data.sources import open_corpus
    from nash_mhc.data.tokenizer import load_tokenizer
    from nash_mhc.data.workers import progress
    from nash_mhc.storage.folders import new_folder

    tokenizer, dataset = loaded.tokenizer, Path(cfg.dataset)
    align = math.lcm(alignment, loaded.config.model.alignment)
    if has_tokenizer and load_tokenizer(cfg.tokenizer).fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"--tokenizer {cfg.tokenizer}: is not the teacher's tokenizer; leave it out")
    if (dataset / FILE).exists():
        recipe = Manifest.read(dataset).recipe
        if recipe["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            raise ConfigError(
                f"--dataset {dataset}: was not prepared with the teacher's tokenizer; prepare it again with that tokenizer"
            )
        if recipe["align"] % loaded.config.model.alignment:
            raise ConfigError(
                f"--dataset {dataset}: its documents start at multiples of {recipe['align']}, but the teacher needs "
                f"{loaded.config.model.alignment}; prepare it again for the teacher"
            )
        if not (out / FILE).exists():
            with new_folder(out) as part:
                shutil.copytree(dataset, part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.teacher*", "teacher*.json"))
        elif Manifest.read(out).identity != Manifest.read(dataset).identity:
            raise ConfigError(f"--out {out}: contains sequences that are not from --dataset {dataset}; choose another folder")
        return
    corpus = open_corpus(cfg)
    with progress(f"preparing {cfg.dataset}") as watch:
        prepare(make_recipe(cfg, tokenizer, corpus, align), tokenizer, corpus, out, dataset=cfg.dataset, report=watch)


def chain_command(argv: Sequence[str]) -> int:
    parser = OneLineParser(prog="python -m nash_mhc.distill chain", allow_abbrev=False, description=ABOUT["chain"])
    parser.add_argument(
        "file", type=local_path, metavar="FILE", help="YAML file of the chain, such as recipes/kd-qat-2bit.yaml"
    )
    parser.add_argument(
        "--out", type=local_path, metavar="DIR", required=True, help="output folder; the same command resumes a chain in it"
    )
    args = parser.parse_strictly(argv, "the folder is --out {word}")
    from nash_mhc.kits.distill.chain import read_chain, results, run_chain, show

    out = Path(args.out).expanduser()
    links = read_chain(Path(args.file).expanduser(), out)
    out.mkdir(parents=True, exist_ok=True)
    if code := run_chain(links):
        return code
    print(show(results(links), out))
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"cache": cache_command, "chain": chain_command}


def main() -> int:
    if not sys.argv[1:]:
        raise ConfigError(f"no command given; usage: {USAGE}")
    if (chosen := chosen_command(ABOUT, USAGE)) is None:
        return 0
    command, argv = chosen
    return _COMMANDS[command](argv)
