"""What the fuzzer damages, and the command that reads it."""

from __future__ import annotations

from pathlib import Path

import fuzz_files as made
from fuzzing import Target, refused_or_read, run_main

from nash_mhc.checkpoint import __main__ as checkpoint
from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.run_lock import acquire
from nash_mhc.config.schema import DataConfig
from nash_mhc.data import __main__ as data
from nash_mhc.data.sources import open_held_out, open_source
from nash_mhc.data.tokenizer import ByteTokenizer, load_tokenizer
from nash_mhc.generate.prompts import read_prompts
from nash_mhc.kits.distill.chain import read_chain
from nash_mhc.kits.hub import command as hub
from nash_mhc.loading.load import config_of
from nash_mhc.report import __main__ as report
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.train import __main__ as train

_FIELDS = ("--prompt-template", "Q: {question}[ ({level})]", "--response-template", " A: {answer}")


def prepare(folder: Path, *flags: object) -> int:
    known = ("--workers", 1, "--seq-len", 64, "--out", folder / "out", "--validation-fraction", 0)
    return run_main(data.main, "prepare", *known, *flags)


def documents(form: str, *flags: str) -> Target:
    return Target(
        lambda folder: made.write_jsonl(folder / "a.jsonl", made.RECORDS[form]),
        {"a.jsonl": "jsonl"},
        lambda folder: prepare(folder, "--dataset", folder / "a.jsonl", "--format", form, *flags),
        makes=("out",),
    )


def inspect_prepared(folder: Path) -> int:
    return run_main(data.main, "inspect", folder / "rows", "--row", 0) or run_main(data.main, "inspect", folder / "rows")


def train_prepared(folder: Path) -> int:
    return run_main(train.main, "--dataset", folder / "rows", "--print-config")


def open_puzzles(folder: Path) -> int:
    cfg = DataConfig(dataset=str(folder / "a.csv"), seq_len=16, validation_fraction=0.2)
    return refused_or_read(
        lambda: (open_source(cfg, ByteTokenizer(), split="train", seed=0), open_held_out(cfg, ByteTokenizer()))
    )


def read_stream(folder: Path) -> int:
    return refused_or_read(lambda: open_source(made.streaming(folder), ByteTokenizer(), split="train", seed=0).take([0, 1]))


def read_report(folder: Path) -> int:
    return run_main(report.main, folder / "run", "--out", folder / "page.html")


def continue_rows(folder: Path) -> int:
    """What of these files a run reads that continues."""

    def read() -> None:
        RunFolder(folder / "run").last_row()
        Telemetry(folder / "run", start_step=2).close()

    return refused_or_read(read)


def inspect_run(folder: Path) -> int:
    return run_main(data.main, "inspect", folder / "run")


def init_from_run(folder: Path) -> int:
    return run_main(train.main, "--init-from", folder / "run", "--print-config")


def go_on_with_run(folder: Path) -> int:
    return run_main(train.main, "--checkpoint-dir", folder / "run", "--tokenizer", "bytes", "--print-config")


def list_checkpoints(folder: Path) -> int:
    return run_main(checkpoint.main, "list", folder / "run")


def verify_checkpoints(folder: Path) -> int:
    return run_main(checkpoint.main, "verify", folder / "run")


def inspect_checkpoint(folder: Path) -> int:
    return run_main(checkpoint.main, "inspect", folder / "run")


def signed_again(folder: Path) -> int:
    """A checkpoint whose values were wrong before they were hashed."""
    return list_checkpoints(folder) or inspect_checkpoint(folder) or init_from_run(folder)


def take_lock(folder: Path) -> int:
    return refused_or_read(lambda: acquire(folder / "run", wait=0).release())


def import_model(folder: Path) -> int:
    return run_main(hub.main, "import", folder / "hf", "--out", folder / "out")


def init_from_model(folder: Path) -> int:
    return run_main(train.main, "--init-from", folder / "hf", "--print-config")


def import_adapters(folder: Path) -> int:
    return run_main(hub.main, "import", folder / "peft", "--base", folder / "hf", "--out", folder / "out")


_HUB = {
    "hf/config.json": "json", "hf/generation_config.json": "json", "hf/model.safetensors.index.json": "json",
    "hf/*.safetensors": "safetensors",
}  # fmt: skip
_RUN_FILES = {"run/metrics.jsonl": "jsonl", "run/eval.jsonl": "jsonl", "run/run.json": "json", "run/result.json": "json"}
_CHECKPOINT_FILES = {
    "run/checkpoints/3/manifest.json": "json", "run/checkpoints/3/values/metadata": "json",
    "run/checkpoints/3/state/_*": "bytes", "run/checkpoints/[03]": "name", "run/checkpoints/3/*": "name",
}  # fmt: skip

TARGETS: dict[str, Target] = {
    "jsonl text": documents("text"),
    "jsonl prompt": documents("prompt"),
    "jsonl chat": documents("chat"),
    "jsonl fields": documents("fields", *_FIELDS),
    "packed documents": Target(
        made.packed_documents, {"*.*": "bytes", "a.jsonl.gz": "bytes", "c.parquet": "bytes"},
        lambda folder: prepare(folder, "--dataset", folder), makes=("out",),
    ),
    "tokenizer": Target(
        made.tokenizer, {"tok/*.json": "json"},
        lambda folder: prepare(folder, "--dataset", folder / "a.jsonl", "--tokenizer", folder / "tok"), makes=("out",),
    ),
    "chat template": Target(
        made.chat_template, {"tok/chat_template.jinja": "jinja", "tok/tokenizer_config.json": "json"},
        lambda folder: prepare(
            folder, "--dataset", folder / "a.jsonl", "--tokenizer", folder / "tok", "--template", "tokenizer"
        ), makes=("out",),
    ),
    "prepared, inspected": Target(
        made.prepared, {"rows/manifest.json": "json", "rows/*.rows": "bytes", "rows/*.origins": "bytes"}, inspect_prepared
    ),
    "prepared, trained on": Target(made.prepared, {"rows/manifest.json": "json"}, train_prepared),
    "puzzles": Target(made.puzzles, {"a.csv": "csv"}, open_puzzles),
    "stream": Target(made.streamed, {"cache/*/*.jsonl": "jsonl", "c.parquet": "bytes"}, read_stream, makes=("cache",)),
    "yaml": Target(made.settings, {"run.yaml": "yaml"}, lambda folder: run_main(
        train.main, "--config", folder / "run.yaml", "--print-config"
    )),
    "chain": Target(
        made.chain, {"chain.yaml": "yaml"},
        lambda folder: refused_or_read(lambda: read_chain(folder / "chain.yaml", folder / "out")),
    ),
    "prompts": Target(made.prompts, {"p.jsonl": "jsonl"}, lambda folder: refused_or_read(lambda: [
        prompt.tokens(load_tokenizer("bytes"))
        for prompt in read_prompts(folder / "p.jsonl", chat=False, system=None) if not prompt.messages
    ])),
    "report": Target(made.run, _RUN_FILES, read_report, makes=("page.html",)),
    "rows of a run that continues": Target(
        made.run, {"run/metrics.jsonl": "jsonl", "run/eval.jsonl": "jsonl"}, continue_rows, makes=("run/",)
    ),
    "run.json, inspected": Target(made.run_on_stories, {"run/run.json": "json"}, inspect_run),
    "run.json, started from": Target(made.run, {"run/run.json": "json"}, init_from_run),
    "run.json, continued": Target(made.run, {"run/run.json": "json"}, go_on_with_run),
    "checkpoints, listed": Target(made.run, _CHECKPOINT_FILES, list_checkpoints),
    "checkpoints, verified": Target(made.run, _CHECKPOINT_FILES, verify_checkpoints, codes=(0, 1, 2)),
    "checkpoints, inspected": Target(made.run, _CHECKPOINT_FILES, inspect_checkpoint),
    "values, signed again": Target(
        made.run, {"run/checkpoints/3/values/metadata": "json"}, signed_again,
        then=lambda folder: manifest.write(folder / "run" / "checkpoints" / "3"),
    ),
    "lock": Target(made.lock, {"run/.lock": "json"}, take_lock, makes=("run/",)),
    "hub model, imported": Target(made.hub_model, _HUB, import_model, makes=("out",)),
    "hub model, started from": Target(made.hub_model, {"hf/config.json": "json"}, init_from_model),
    "adapters": Target(
        made.adapters, {"peft/adapter_config.json": "json", "peft/adapter_model.safetensors": "safetensors"}, import_adapters,
        makes=("out",),
    ),
    "packed model": Target(
        made.packed, {"packed/packed.json": "json"}, lambda folder: refused_or_read(lambda: config_of(str(folder / "packed")))
    ),
}  # fmt: skip
