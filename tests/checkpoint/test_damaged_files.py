"""Damaged files of a run or dataset are skipped with a message or refused in one line."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import bigram
import pytest
import runs

from nash_mhc.checkpoint import __main__ as checkpoint_command
from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.schema import ARCHITECTURES, ConfigError, DataConfig, weighted_parts
from nash_mhc.data.prepared.folder import FILE, Manifest
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import ByteTokenizer
from nash_mhc.generate.prompts import read_prompts


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The bigram model is known to the tests of this file alone: others look at all kinds of models."""
    bigram.register()
    yield
    del ARCHITECTURES["bigram"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of four steps with checkpoints at two of them."""
    cfg = dataclasses.replace(runs.RUN, model=bigram.BigramConfig())
    folder = tmp_path_factory.mktemp("trained") / "run"
    runs.at(folder, cfg, evaluated=False, total_steps=4, eval_interval=0, log_interval=1, checkpoint_interval=2)
    return folder


def goes_on(folder: Path) -> None:
    cfg = dataclasses.replace(runs.RUN, model=bigram.BigramConfig())
    runs.at(folder, cfg, evaluated=False, total_steps=5, eval_interval=0, log_interval=1, checkpoint_interval=2)


DAMAGE = {
    "garbage": lambda line: b"%&/ (garbage",
    "not UTF-8": lambda line: line.replace(b"loss", b"l\xffss", 1),
    "no step": lambda line: line.replace(b'"step"', b'"stop"', 1),
    "a flipped bit": lambda line: line.replace(b'"step": 2', b'"step": \x72', 1),
    "a step that is text": lambda line: line.replace(b'"step": 2', b'"step": "2"', 1),
    "deep": lambda line: b"[" * 100_000,
    "an infinite step": lambda line: line.replace(b'"step": 2', b'"step": 1e999', 1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_row_is_named_by_its_line(tmp_path, trained, name):
    lines = (trained / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([lines[0], DAMAGE[name](lines[1].rstrip()) + b"\n", *lines[2:]]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: "):
        RunFolder(tmp_path).rows()


def test_a_run_resumes_without_damaged_rows_and_keeps_a_copy_of_the_file(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "run")
    first, second, *others = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join([first, *(damage(second.rstrip()) + b"\n" for damage in DAMAGE.values()), *others])
    (folder / "metrics.jsonl").write_bytes(damaged)
    goes_on(folder)
    assert [row["step"] for row in RunFolder(folder).rows()] == [1, 3, 4, 5]
    assert (folder / "metrics.jsonl.damaged").read_bytes() == damaged


def test_rows_of_a_lost_checkpoint_are_found_after_damaged_lines(tmp_path, trained):
    """Otherwise the run would begin anew and erase them."""
    folder = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    before = (folder / "metrics.jsonl").read_bytes() + b"\xff\n[1\n"
    (folder / "metrics.jsonl").write_bytes(before)
    with pytest.raises(ConfigError, match=r"rows up to step 4, but .*checkpoints are missing"):
        goes_on(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_folder_with_another_name_is_not_a_checkpoint(tmp_path, trained, capsys, is_copy):
    folder = shutil.copytree(trained, tmp_path / "run")
    names = ["020", "٣٣", "1٣", "99999999999999999999"]
    for name in names:
        if is_copy:
            shutil.copytree(folder / "checkpoints" / "4", folder / "checkpoints" / name)
        else:
            (folder / "checkpoints" / name).mkdir()
    goes_on(folder)
    assert RunFolder(folder).steps() == [2, 4, 5] and RunFolder(folder).set_aside() == []
    assert all((folder / "checkpoints" / name).is_dir() for name in names)
    assert checkpoint_command.list_command(folder / "checkpoints", None) == 0
    shown = capsys.readouterr().out
    assert not any(name in shown for name in names)


def test_a_renamed_checkpoint_is_not_a_later_step(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "checkpoints" / "4").rename(folder / "checkpoints" / "400")
    assert "step 4" in str(manifest.problem(folder / "checkpoints" / "400"))
    goes_on(folder)
    assert RunFolder(folder).steps() == [2, 4, 5] and RunFolder(folder).set_aside() == ["400.damaged"]


def prepared(folder: Path, *lines: str, **settings: str):
    file = folder / "a.jsonl"
    file.write_text("".join(line + "\n" for line in lines))
    cfg = DataConfig(dataset=str(file), cache_dir=str(folder / "cache"), seq_len=64, **settings)  # type: ignore[arg-type]
    open_source(cfg, ByteTokenizer(), split="train", seed=0)
    (made,) = (folder / "cache").glob(f"*/{FILE}")
    return Manifest.read(made.parent)


GOOD = [json.dumps({"text": f"a good line with the number {i}"}) for i in range(9)]


@pytest.mark.parametrize("lines", [["[" * 100_000], [*GOOD, '{"text": ' * 100_000]], ids=["the first line", "a later one"])
def test_deeply_nested_json_is_a_one_line_error(tmp_path, lines):
    with pytest.raises(ConfigError, match=rf"a\.jsonl:{len(lines)}: .*nested too deeply"):
        prepared(tmp_path, *lines)
    assert not list((tmp_path / "cache").iterdir())


def test_records_with_null_text_are_skipped_and_counted(tmp_path):
    assert prepared(tmp_path, *GOOD, '{"text": null}').empty == 1


NULLS = {
    "no response": ('{"prompt": "why?", "response": null}', "prompt"),
    "an empty one": ('{"prompt": "why?", "response": ""}', "prompt"),
    "no answer": ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}', "chat"),
}


@pytest.mark.parametrize("name", NULLS)
def test_a_record_without_an_answer_is_skipped_and_counted(tmp_path, name):
    """Only the template would be left to learn from."""
    record, form = NULLS[name]
    answers = [{"prompt": f"why {i}?", "response": f"because {i}"} for i in range(9)]
    chat = lambda r: {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["response"]}]}
    good = [json.dumps(r if form == "prompt" else chat(r)) for r in answers]
    found = prepared(tmp_path, *good, record, format=form)
    assert found.empty == 1
    assert sum(split.documents for split in found.splits.values()) == 9


def test_half_a_character_in_a_prompt_is_a_one_line_error(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\ud800"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: prompt .*surrogate"):
        read_prompts(tmp_path / "p.jsonl", chat=False, system=None)


def test_null_messages_fall_back_to_the_prompt(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "why?", "messages": null}')
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl", chat=False, system=None)] == ["why?"]


@pytest.mark.parametrize("messages", [3, [], [3], {}, "x"])
def test_invalid_messages_are_refused_even_with_a_prompt(tmp_path, messages):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "why?", "messages": messages}))
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: "):
        read_prompts(tmp_path / "p.jsonl", chat=False, system=None)


@pytest.mark.parametrize("name", ["[" * 100_000, ":" * 100_000, "a:" * 50_000])
def test_a_long_dataset_name_is_refused(name):
    began = time.process_time()
    with pytest.raises(ConfigError, match="too long"):
        DataConfig(dataset=name)
    assert time.process_time() - began < 1


def test_mixture_weights_are_parsed():
    assert weighted_parts("a:0.7,b:.3") == [("a", "0.7"), ("b", ".3")]
    assert weighted_parts("C:1/a,b:0.7,c d:2") == [("C:1/a,b", "0.7"), ("c d", "2")]
    assert [weighted_parts(text) for text in ("", "a", "a:0.7,", "a:0.7,b", ":0.7", "a:x")] == [[]] * 6
