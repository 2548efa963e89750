"""Model and tokenizer agree on the begin token everywhere, and on the vocabulary."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hub_models import KINDS, save
from runs import at

from nash_mhc.config import ConfigError
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.parsing import parse
from nash_mhc.data.__main__ import prepare_command
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import load_tokenizer, prefix_of
from nash_mhc.evaluate import __main__ as evaluate
from nash_mhc.generate import __main__ as generate
from nash_mhc.generate.prompts import Prompt, chat_prompt
from nash_mhc.kits.distill.command import cache_command
from nash_mhc.kits.hub import command as hub
from nash_mhc.kits.hub.writing import import_folder
from nash_mhc.loading.load import load, tokenizer_of
from nash_mhc.train.inferred_settings import infer_settings

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}[answer]"
TEXTS = ["Once upon a time", "Two"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model whose tokenizer adds a begin token."""
    folder = save(tmp_path_factory.mktemp("pairs") / "llama", KINDS["llama"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "<|endoftext|>" + CHAT}))
    return folder


@pytest.fixture(scope="module")
def qwen(llama):
    """A model whose tokenizer adds no begin token."""
    folder = shutil.copytree(llama, llama.parent / "qwen")
    values = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(values | {"post_processor": None}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT}))
    return folder


def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_begin_tokens_equal_transformers(name, request):
    from nash_mhc.evaluate.harness_model import HarnessModel  # not where tests are collected: it takes seconds

    folder = request.getfixturevalue(name)
    ours, other = tokenizer_of(str(folder)), theirs(folder)
    for text in (*TEXTS, "<|endoftext|>x"):
        assert Prompt(text).tokens(ours)[-1:] == other(text).input_ids[-1:]
        if not text.startswith("<"):
            assert Prompt(text).tokens(ours) == other(text).input_ids
            assert (
                HarnessModel.tok_encode(SimpleNamespace(loaded=SimpleNamespace(tokenizer=ours)), text) == other(text).input_ids
            )
    said = chat_prompt("Who?", "Be brief.")
    assert said.tokens(ours) == other.apply_chat_template(list(said.messages), add_generation_prompt=True)["input_ids"]
    assert Prompt("").tokens(ours) == [256] == [prefix_of(ours)]  # something has to


def documents_of(cfg):
    """Return inputs and targets of each document of the first sequence."""
    tokenizer = load_tokenizer(cfg.data.tokenizer, begin_with_end=cfg.data.begin_with_end)
    row = open_source(cfg.data, tokenizer, split="train", seed=0, align=cfg.model.alignment)[0]
    segments = [row.segments == s for s in range(1, row.segments.max() + 1)]
    return {bytes(row.targets[s][row.weights[s] > 0][:-1].tolist()): row.inputs[s].tolist() for s in segments}


def test_training_sequences_begin_like_prompts(qwen, llama, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = ["--validation-fraction", "0", "--seq-len", "64", "--cache-dir", str(tmp_path / "cache")]
    configured = lambda *argv: parse([*settings, *argv], found=infer_settings).config
    for folder, begin in ((qwen, []), (llama, [256])):
        begun = configured("--init-from", str(folder), "--dataset", str(data))
        out = str(tmp_path / f"{folder.name}-rows")
        assert prepare_command(["--dataset", str(data), "--out", out, "--tokenizer", str(folder), *settings[:4]]) == 0
        for cfg in (begun, configured("--init-from", str(folder), "--dataset", out)):
            documents = documents_of(cfg)
            for text in TEXTS:
                tokens = text.encode()
                inputs = documents[tokens if begin else tokens[1:]]
                assert inputs[: len(tokens) + len(begin)] == Prompt(text).tokens(tokenizer_of(str(folder))) == [*begin, *tokens]
    # Ours, and whoever asks for it, have the end token there; rows that were prepared so say it themselves.
    assert documents_of(configured("--dataset", str(data)))[TEXTS[0].encode()][0] == 256
    out = str(tmp_path / "ended")
    prepare_command(["--dataset", str(data), "--out", out, "--tokenizer", str(qwen), *settings[:4], "--begin-with-end"])
    cfg = configured("--init-from", str(qwen), "--dataset", out)
    assert cfg.data.begin_with_end and documents_of(cfg)[TEXTS[0].encode()][0] == 256
    with pytest.raises(ConfigError, match=r"--dataset .*ended: .* add --begin-with-end"):
        documents_of(configured("--init-from", str(qwen), "--dataset", out, "--no-begin-with-end"))


def test_an_exported_tokenizer_adds_the_begin_token_like_generate(qwen, tmp_path):
    import_folder(qwen, tmp_path / "imported")
    # A run of an older version, which read its documents with the end token in front.
    old = shutil.copytree(tmp_path / "imported", tmp_path / "old")
    info = json.loads((old / "run.json").read_text())
    del info["config"]["data"]["begin_with_end"], info["imported"]
    (old / "run.json").write_text(json.dumps(info))
    for folder, begin in (("imported", []), ("old", [256])):
        sys_argv = ["hub", "export", str(tmp_path / folder), "--out", str(tmp_path / f"{folder}-out")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys_argv)
            assert hub.main() == 0
        want = Prompt("Once").tokens(load(tmp_path / folder).tokenizer)
        assert want == theirs(tmp_path / f"{folder}-out")("Once").input_ids == [*begin, *b"Once"]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_everywhere(qwen, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(qwen, tmp_path / "larger")
    values = json.loads((folder / "tokenizer.json").read_text())
    extra = [values["added_tokens"][0] | {"id": 257 + n, "content": f"<extra{n}>"} for n in range(60)]
    (folder / "tokenizer.json").write_text(json.dumps(values | {"added_tokens": [*values["added_tokens"], *extra]}))
    out = tmp_path / "out"
    for module, argv in (
        (generate, [folder, "--prompt", "One"]),
        (evaluate, [folder, "--tasks", "stories"]),
        (hub, ["import", folder, "--out", out]),
        (hub, ["export", folder, "--out", out]),
        (hub, ["check", folder, qwen]),
    ):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, argv)])
        assert one_line_errors(module.main) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "tokenizer has 317 tokens" in said and "only 300" in said
    with pytest.raises(ConfigError, match=r"317 tokens.* only 300"):
        cache_command(["--teacher", str(folder), "--out", str(out), "--dataset", "stories", "--max-documents", "2"])
    with pytest.raises(ConfigError, match=r"317 tokens.* only 300"):
        at(out, parse(["--init-from", str(folder), "--seq-len", "32", "--batch-size", "8"], found=infer_settings).config)
    assert not out.exists()
    assert np.prod(load(qwen).model.unembed_VD.shape) > 0  # whose own one fits
