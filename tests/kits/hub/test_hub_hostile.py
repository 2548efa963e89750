"""Damaged or malicious Hugging Face folders are refused in one line; no code runs and no files are left."""

import json
import struct
import subprocess
import sys

import hub_models
import numpy as np
import pytest
from safetensors.numpy import load_file

from nash_mhc.config import ConfigError
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.kits.hub import command as hub
from nash_mhc.kits.hub.config_json import read_config
from nash_mhc.kits.hub.folder import HubFolder
from nash_mhc.kits.hub.tensors import shapes
from nash_mhc.kits.hub.writing import write_byte_tokenizer

CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "vocab_size": 300, "num_key_value_heads": 2,
}  # fmt: skip
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    """A small model of zeros, written without transformers."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    write_byte_tokenizer(made)
    held = {name: np.zeros(shape, np.float32) for name, shape in shapes(read_config(CONFIG, "").model).items()}
    hub_models.save_pieces(made, held)
    HubFolder(made).check()
    return made


def refused(folder, *facts, monkeypatch):
    """Check that the import is refused with one line that contains these facts."""
    out = folder.parent / "out"
    monkeypatch.setattr(sys, "argv", ["hub", "import", str(folder), "--out", str(out)])
    with pytest.raises(ConfigError) as error:
        hub.main()
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    for fact in facts:
        assert fact in str(error.value)
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, *KEPT}


KEPT = ("elsewhere.safetensors", "blobs")  # what a test lays beside the folder


def entry(dtype="F32", shape=(8,), offsets=(0, 32)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# What the one piece that holds the last norm alone is replaced by, and what the line says of it.
HEADERS = {
    "overlapping": raw({NORM: entry(), "b": entry(offsets=(16, 48))}, bytes(48)),
    "the same bytes twice": raw({NORM: entry(), "b": entry()}, bytes(32)),
    "bytes at the end": raw({NORM: entry()}, bytes(33)),
    "a hole": raw({NORM: entry(offsets=(8, 40))}, bytes(40)),
    "negative offsets": raw({NORM: entry(offsets=(-32, 0))}, bytes(32)),
    "a shape of floats": raw({NORM: entry(shape=(8.0,))}, bytes(32)),
    "a shape without bounds": raw({NORM: entry(shape=(2**62, 8))}, bytes(32)),
    "nested": raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "nested, and never closed": raw(b"[" * 100_000),
    "a list": raw([1]),
    "another type": raw({NORM: entry(dtype="F31")}, bytes(32)),
    "numbers as metadata": raw({"__metadata__": {"a": 1}, NORM: entry()}, bytes(32)),
    "longer than the file": b"\xff" * 100,
    "not UTF-8": raw(b"\xff\xfe"),
    "cut": raw({NORM: entry()}, bytes(31)),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_file_is_refused_in_one_line(name, folder, monkeypatch):
    (folder / hub_models.piece_of(folder, NORM)).write_bytes(HEADERS[name])
    refused(folder, hub_models.piece_of(folder, NORM), monkeypatch=monkeypatch)


@pytest.mark.parametrize("name", ["x" * 100_000, "two\nlines", "\x1b[31mred"])
def test_a_strange_tensor_name_is_shortened(name, folder, monkeypatch):
    held = raw({NORM: entry(), name: entry(offsets=(32, 64))}, bytes(64))
    (folder / hub_models.piece_of(folder, NORM)).write_bytes(held)
    refused(folder, "config.json", monkeypatch=monkeypatch)


@pytest.mark.parametrize("name", [
    "../../../etc/passwd", "/etc/passwd", "../elsewhere.safetensors", "{outside}", "sub/../../elsewhere.safetensors", "", ".",
    7, None, ["a.safetensors"], "a" * 300 + ".safetensors", "nul\0.safetensors", "line\n.safetensors", "pytorch_model.bin",
])  # fmt: skip
def test_an_index_cannot_name_files_elsewhere(name, folder, monkeypatch):
    outside = folder.parent / "elsewhere.safetensors"
    outside.write_bytes((folder / hub_models.piece_of(folder, NORM)).read_bytes())  # sound, and no part of the folder
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"][NORM] = str(outside) if name == "{outside}" else name
    index.write_text(json.dumps(values))
    refused(folder, index.name, NORM, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}', "{", "[" * 100_000]
)
def test_an_invalid_index_is_refused(text, folder, monkeypatch):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json", monkeypatch=monkeypatch)


def test_a_tensor_in_two_files_is_refused(folder, monkeypatch):
    piece = folder / hub_models.piece_of(folder, NORM)
    other = next(file for file in folder.glob("*.safetensors") if file != piece)
    hub_models.save_file(load_file(piece) | load_file(other), piece)
    refused(folder, "is also in", monkeypatch=monkeypatch)


def test_links_of_the_hub_cache_are_followed(folder):
    """After `hf download` without --local-dir, files are links to blobs outside the model's folder."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../blobs/{number}")
    assert NORM in HubFolder(folder).check()


@pytest.mark.parametrize("change", [
    {"num_hidden_layers": 10**12}, {"vocab_size": 10**18},
    {"eos_token_id": "end"}, {"eos_token_id": [[1]]}, {"max_position_embeddings": 1e400},
    {"model_type": ["llama"]}, {"model_type": {}}, {"hidden_act": []}, {"vocab_size": True}, {"hidden_size": 8.0},
    {"num_attention_heads": 0}, {"layer_types": [["full_attention"]]}, {"layer_types": 7}, {"rope_parameters": [1]},
    {"rope_scaling": "yarn"}, {"rope_theta": "far"}, {"rms_norm_eps": None}, {"tie_word_embeddings": "no"},
])  # fmt: skip
def test_a_setting_of_the_wrong_type_is_refused_by_name(change, folder, monkeypatch):
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    said = () if next(iter(change.values())) in (10**12, 10**18) else tuple(change)
    refused(folder, *said, monkeypatch=monkeypatch)


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_never_runs_and_does_not_prompt(where, folder, monkeypatch):
    """transformers would prompt on the terminal and run it after a yes."""
    values = json.loads((folder / where).read_text())
    maps = {"AutoConfig": "harm.Config", "AutoModelForCausalLM": "harm.Model", "AutoTokenizer": ["harm.Tokenizer", None]}
    (folder / where).write_text(json.dumps(values | {"auto_map": maps}))
    (folder / "harm.py").write_text(f"open({str(folder / 'harmed')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    refused(folder, where, "auto_map", monkeypatch=monkeypatch)
    if where == "tokenizer_config.json":
        with pytest.raises(ConfigError, match="auto_map"):
            load_tokenizer(str(folder))
    assert not (folder / "harmed").exists()


@pytest.mark.long
def test_a_command_prints_one_line_and_exits_with_2(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoConfig": "harm.Config"}}))
    command = [sys.executable, "-m", "nash_mhc.hub", "import", str(folder), "--out", str(folder.parent / "out")]
    done = subprocess.run(command, input="y\n", capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "auto_map" in done.stderr
    assert not (folder.parent / "out").exists()
