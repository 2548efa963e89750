"""Batches of prompts, conversations, stop strings and repetition penalty, on our and Hugging Face models."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import small
from hub_models import KINDS, by_torch, save
from runs import drawn_run

from nash_mhc.config import ConfigError
from nash_mhc.config.commands import one_line_errors
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.generate import __main__ as generate
from nash_mhc.generate.prompts import Prompt, before_stop, chat_prompt
from nash_mhc.loading.load import load
from nash_mhc.model.sampling import Sampling, generate_rows, generate_tokens, penalize_repetition

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}[answer]"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A run of the full architecture, whose blocks, windows and streams must not mix texts."""
    cfg = small.nash_config()
    return drawn_run(tmp_path_factory.mktemp("prompts") / "run", replace(cfg, model=replace(cfg.model, layers=1)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("prompts") / "hub", KINDS["qwen2, tied"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


def command(monkeypatch, capsys, *argv):
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, argv)])
    code = one_line_errors(generate.main)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("how", [Sampling(0.0), Sampling(1.0, 20, 0.9, 1.3)])
def test_a_batch_generates_the_same_texts_as_single_prompts(ours, how):
    """Prompts longer than the window and the context: the cache restarts for all at once."""
    model = load(ours).model
    prompts = [[256, *range(60, 60 + n)] for n in (0, 3, 40, 17)]
    options = {"seq_len": 32, "ends": {256}, "max_tokens": 30, "seed": 3}
    together = {row: [] for row in range(len(prompts))}
    for row, token in generate_rows(model, prompts, how, **options):
        together[row].append(token)
    for row, prompt in enumerate(prompts):
        for at_once in (7, 100):  # without the host in between
            assert together[row] == [token for _, token in generate_rows(model, [prompt], how, at_once=at_once, **options)]
        assert together[row] == [token for _, token in generate_rows(model, [prompt], how, **options)]
    assert max(map(len, together.values())) == 30
    many: dict[int, list[int]] = {row: [] for row in range(len(prompts))}
    for row, token in generate_rows(model, prompts, how, at_once=7, **options):
        many[row].append(token)
    assert many == together
    if how == Sampling(0.0):
        assert together[1] == list(generate_tokens(model, prompts[1], seq_len=32, end=256, max_tokens=30, how=Sampling(0.0)))


def test_repetition_penalty_equals_transformers(theirs):
    import torch

    loaded, prompt = load(theirs), [256, *range(65, 85)]
    options = {"seq_len": 128, "ends": (), "max_tokens": 40}
    got = [token for _, token in generate_rows(loaded.model, [prompt], Sampling(0.0, repetition_penalty=1.4), **options)]
    plain = [token for _, token in generate_rows(loaded.model, [prompt], Sampling(0.0), **options)]
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = by_torch(theirs).generate(torch.tensor([prompt]), repetition_penalty=1.4, **settings)
    assert got == want[0, len(prompt) :].tolist()
    assert got != plain
    logits, seen = np.array([2.0, -2.0, 2.0, -2.0], np.float32), np.array([True, True, False, False])
    np.testing.assert_allclose(jax.jit(penalize_repetition, static_argnums=2)(logits, seen, 2.0), [1.0, -4.0, 2.0, -2.0])


@pytest.mark.parametrize("end", ["whole", "in pieces"])
def test_text_ends_before_a_stop_string(end):
    text = "one two\n\nQ: three\n\nQuiet"
    pieces = iter([text] if end == "whole" else list(text))
    seen = list(before_stop(pieces, ["\n\nQ:", "four"]))
    assert "".join(seen) == "one two"
    assert "".join(before_stop(iter("a\n\nQ"), ["\n\nQ:"])) == "a\n\nQ"  # which never became one
    assert "".join(before_stop(iter("abc"), [])) == "abc"


def test_a_file_of_prompts_is_answered_in_order(ours, tmp_path, monkeypatch, capsys):
    texts = ["One", "", "A little more to read", "Two", "Three"]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    argv = [ours, "--prompts", tmp_path / "prompts.txt", "--max-tokens", 9, "--temperature", 0, "--batch-size", 3]
    code, out, err = command(monkeypatch, capsys, *argv)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == [text for text in texts if text]
    assert "3 of 4 prompts\n" in err
    assert err.rstrip().endswith("tokens/s")
    for line in lines:
        _, alone, _ = command(monkeypatch, capsys, ours, "--prompt", line["prompt"], "--max-tokens", 9, "--temperature", 0)
        assert alone == line["prompt"] + line["text"] + "\n"
    stop = next(letter for line in lines for letter in line["text"][:-1] if letter.isascii())
    _, out, _ = command(monkeypatch, capsys, *argv, "--stop", stop, "--out", tmp_path / "out.jsonl")
    assert out == ""
    stopped = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line, whole in zip(stopped, lines, strict=True):
        assert line["text"] == whole["text"].split(stop)[0]
        assert line["tokens"] <= whole["tokens"]
    assert any(line["tokens"] < whole["tokens"] and line["ended"] for line, whole in zip(stopped, lines, strict=True))


def test_a_conversation_uses_the_chat_template(theirs, tmp_path, monkeypatch, capsys):
    loaded = load(theirs)
    spelled = [256, *b"[system]Be brief.", 256, *b"[user]Who?", 256, *b"[answer]"]
    want = list(generate_tokens(loaded.model, spelled, seq_len=128, end=256, max_tokens=8, how=Sampling(0.0)))
    options = ["--max-tokens", 8, "--temperature", 0]
    code, out, _ = command(monkeypatch, capsys, theirs, "--chat", "--system", "Be brief.", "--prompt", "Who?", *options)
    assert (code, out) == (0, loaded.tokenizer.decode(np.array(want)) + "\n")
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"prompt": "plain"}) + "\n")
    _, out, _ = command(monkeypatch, capsys, theirs, "--prompts", tmp_path / "talks.jsonl", *options)
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[0]["text"] == loaded.tokenizer.decode(np.array(want))
    assert [line["prompt"] for line in lines] == ["Who?", "plain"]


def test_a_template_with_the_begin_token_gets_no_second_one(theirs, tmp_path):
    settings = json.loads((theirs / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((theirs / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "<|endoftext|>" + TEMPLATE}))
    plain, spelled = (chat_prompt("Who?", None).tokens(load_tokenizer(str(folder))) for folder in (theirs, tmp_path))
    assert plain == spelled == [256, *b"[user]Who?", 256, *b"[answer]"]
    assert Prompt("<|endoftext|>").tokens(load_tokenizer(str(theirs))) == [256, 256]  # what someone writes is what is read


def test_every_end_token_of_the_model_ends_a_text(theirs, tmp_path):
    for file in theirs.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 70]}))
    assert set(load(tmp_path).stops) == {256, 70}
    model = load(tmp_path).model
    free = [token for _, token in generate_rows(model, [[256]], Sampling(1.0), seq_len=64, ends=(), max_tokens=40)]
    cut = [token for _, token in generate_rows(model, [[256]], Sampling(1.0), seq_len=64, ends=(free[7],), max_tokens=40)]
    assert cut == free[: free.index(free[7])]


@pytest.mark.parametrize(("argv", "lines", "said"), [
    (["--chat", "--prompt", "x"], None, "has no chat template"),
    (["--system", "x"], None, "--system needs --chat"),
    (["--stop", ""], None, "--stop is empty"),
    (["--out", "x"], None, "--out needs --prompts"),
    (["--prompt", "x", "--prompts", "FILE"], "", "--prompt cannot be combined with --prompts"),
    (["--prompts", "FILE"], "\n\n", "contains no prompt"),
    (["--prompts", "FILE"], "{", "prompts.jsonl:1: not JSON"),
    (["--prompts", "FILE"], '{"prompt": "a"}\n{"question": "a"}', "prompts.jsonl:2: has neither a prompt"),
    (["--prompts", "FILE", "--out", "/no/such/folder/x"], '{"prompt": "a"}', "--out /no/such/folder/x: cannot be written"),
    (["--prompts", "/no/such/file"], None, "--prompts /no/such/file: cannot be read"),
    (["--repetition-penalty", "0"], None, "--repetition-penalty must be above 0"),
])  # fmt: skip
def test_each_mistake_is_one_line(argv, lines, said, ours, tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompts.jsonl"
    if lines is not None:
        file.write_text(lines)
    argv = [str(file) if word == "FILE" else word for word in argv]
    code, out, err = command(monkeypatch, capsys, ours, *argv)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    with pytest.raises(ConfigError):
        load(ours).tokenizer.render_chat([])


def test_a_cache_is_no_larger_than_the_text(theirs, monkeypatch, capsys):
    """A model with 131,072 positions does not allocate a cache for all of them."""
    asked = []
    plain = generate_rows
    monkeypatch.setattr(
        "nash_mhc.model.sampling.generate_rows",
        lambda *a, seq_len, **k: (asked.append(seq_len), plain(*a, seq_len=seq_len, **k))[1],
    )
    values = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 131072}))
    try:
        command(monkeypatch, capsys, theirs, "--prompt", "One", "--max-tokens", 4)
    finally:
        (theirs / "config.json").write_text(json.dumps(values))
    assert asked == [256]
    assert jax.device_count() == 8
