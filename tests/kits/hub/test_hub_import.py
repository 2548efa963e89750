"""Import and export of Hugging Face models: the same logits, text and bytes, and one-line errors."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from hub_models import KINDS, by_torch, save, tensors, torch_logits
from runs import at, drawn_run
from safetensors.numpy import save_file
from sampled import long

from nash_mhc.config import ConfigError, parsing
from nash_mhc.config.model import RopeScaling
from nash_mhc.config.schema import MeshConfig, RunConfig
from nash_mhc.kits.hub import command as hub
from nash_mhc.kits.hub.config_json import family_config, family_of, read_config
from nash_mhc.kits.hub.folder import Entry, HubFolder, read_weights
from nash_mhc.kits.hub.tensors import shapes
from nash_mhc.loading.load import load
from nash_mhc.model.sampling import Sampling, generate_tokens
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.inferred_settings import infer_settings
from nash_mhc.train.resume import check_resume
from nash_mhc.train.state import sharded_abstract_state

PLAIN = ("llama", "qwen2, tied")  # of the others, each has more: pieces, windows, stretched positions, a dtype
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 96), np.int32)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a function that creates a folder of each kind on demand."""
    root, made = tmp_path_factory.mktemp("hub"), {}

    def folder(name):
        if name not in made:
            made[name] = save(root / str(len(made)), KINDS[name])
        return made[name]

    return folder


forward = jax.jit(lambda model, tokens: model(tokens))


def logits_of(model):
    return np.asarray(forward(model, jnp.asarray(TOKENS)))


def call(*argv, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hub", *map(str, argv)])
    return hub.main()


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers(folders, name):
    got = logits_of(load(folders(name)).model)
    np.testing.assert_allclose(got, torch_logits(folders(name), TOKENS), atol=1e-5)


@pytest.mark.parametrize("name", [*(name for name in KINDS if name not in PLAIN), *long(*PLAIN)])
def test_import_and_export_preserve_the_files(folders, name, tmp_path, monkeypatch):
    assert call("import", folders(name), "--out", tmp_path / "ours", monkeypatch=monkeypatch) == 0
    assert call("export", tmp_path / "ours", "--out", tmp_path / "back", monkeypatch=monkeypatch) == 0
    assert tensors(tmp_path / "back") == tensors(folders(name))
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "back" / file).read_text()) == json.loads((folders(name) / file).read_text())
    # Small files, an index beside them: what others wrote in pieces can be read, and so can what we do.
    assert call("export", folders(name), "--out", tmp_path / "pieces", "--shard-size", "2e-5", monkeypatch=monkeypatch) == 0
    assert len(list((tmp_path / "pieces").glob("*.safetensors"))) > 2
    assert tensors(tmp_path / "pieces") == tensors(folders(name))
    HubFolder(tmp_path / "pieces").check()


@pytest.mark.parametrize(
    "name", [pytest.param("llama, far, tied, bfloat16, in pieces", marks=pytest.mark.long), "qwen3, tied, window"]
)
def test_greedy_text_equals_transformers(folders, name):
    import torch

    loaded, prompt = load(folders(name)), [256, *range(65, 95)]
    options = {"seq_len": 128, "end": -1, "max_tokens": 60, "how": Sampling(temperature=0.0)}
    ours = list(generate_tokens(loaded.model, prompt, **options))
    model = by_torch(folders(name))
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours == theirs[0, len(prompt) :].tolist()


def test_each_device_of_a_mesh_reads_its_shards(folders, monkeypatch):
    folder = HubFolder(folders("qwen2, far, bfloat16"))
    alone = load(folder.path).model
    cfg = RunConfig(model=folder.imported.model, mesh=MeshConfig(data=2, fsdp=2, tp=2))
    like = sharded_abstract_state(cfg, make_mesh(cfg.mesh)).model
    asked, plain = [], Entry.reader

    def watched(entry):
        def read(part):
            asked.append((entry.shape, plain(entry)(part)))
            return asked[-1][1]

        return read

    monkeypatch.setattr(Entry, "reader", watched)
    spread = read_weights(folder, like)
    for a, b, wanted in zip(*map(jax.tree.leaves, (spread, alone, like)), strict=True):
        assert a.sharding == wanted.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    largest = max(part.size for shape, part in asked if shape == (48, 32))
    assert largest == 32 * 48 // 4  # a matrix that four devices share: each its quarter, nobody the whole


def test_values_that_overflow_the_dtype_are_refused_and_leave_nothing(folders, tmp_path, monkeypatch):
    source = shutil.copytree(folders("llama"), tmp_path / "source")
    name = "model.layers.1.self_attn.q_proj.weight"
    broken(source, lambda held, torch: held[name][0, :2].copy_(torch.tensor([1e5, -7e4])))
    with pytest.raises(ConfigError, match=rf"--dtype float16: {name} .*100000.*65504"):
        call("export", source, "--out", tmp_path / "out", "--dtype", "float16", monkeypatch=monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    call("export", source, "--out", tmp_path / "out", "--dtype", "bfloat16", monkeypatch=monkeypatch)
    broken(source, lambda held, torch: held[name][0, :3].copy_(torch.tensor([65504.0, -65504.0, float("inf")])))
    call("export", source, "--out", tmp_path / "half", "--dtype", "float16", monkeypatch=monkeypatch)
    assert {kind for kind, *_ in tensors(tmp_path / "half").values()} == {"F16"}


@pytest.mark.long
def test_frozen_tensors_are_exported_unchanged(folders, tmp_path, monkeypatch):
    source = folders("qwen3, tied, window")
    argv = [
        "--init-from",
        str(source),
        "--train-only",
        "layers.ffn.*",
        "--seq-len",
        "64",
        "--batch-size",
        "8",
        "--sample-tokens",
        "0",
    ]
    argv += ["--total-steps", "4", "--warmup-steps", "0", "--eval-interval", "0", "--learning-rate", "3e-4"]
    argv += ["--mesh-fsdp", "2", "--mesh-tp", "2", "--mesh-data", "2"]
    cfg = parsing.parse(argv, found=infer_settings).config
    assert cfg.model == HubFolder(source).imported.model
    result = at(tmp_path / "run", cfg, evaluated=False)
    assert call("export", result.folder, "--out", tmp_path / "out", monkeypatch=monkeypatch) == 0
    before, after = tensors(source), tensors(tmp_path / "out")
    assert set(before) == set(after)
    assert {name for name in before if before[name] != after[name]} == {name for name in before if ".mlp." in name}
    assert "| steps | 4 |" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())
    tuned = logits_of(load(result.folder).model)
    np.testing.assert_allclose(torch_logits(tmp_path / "out", TOKENS), tuned, atol=1e-5)


@pytest.mark.parametrize(("family", "model"), [
    ("llama", {"qk_norm": False}),
    ("qwen2", {"qk_norm": False, "qkv_bias": True, "rope_scaling": "yarn,factor=2,original=16"}),
    ("qwen3", {"tied_embeddings": False}),
])  # fmt: skip
def test_a_plain_decoder_exports_as_a_transformers_model(family, model, tmp_path, monkeypatch):
    """A tied table that is scaled on input becomes two tables."""
    run = drawn_run(tmp_path / "run", small.config(**{f"model__{k}": v for k, v in model.items()}))
    assert call("export", run, "--out", tmp_path / "out", monkeypatch=monkeypatch) == 0
    assert by_torch(tmp_path / "out").config.model_type == family
    ours = logits_of(load(run).model)
    np.testing.assert_allclose(torch_logits(tmp_path / "out", TOKENS), ours, atol=1e-5)
    from transformers import AutoTokenizer

    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path / "out"), "Grüße, 世界\n  ok"
    assert tokenizer(text)["input_ids"] == [256, *text.encode()]  # as every document that the model has read began
    assert tokenizer.decode(list(text.encode())) == text


def test_a_nash_mhc_model_exports_with_its_code(tmp_path, monkeypatch, capsys):
    """Through our commands; tests/hub/test_torch_model.py tests the code."""
    cfg = small.nash_config()
    model = dataclasses.replace(cfg.model, rope_scaling="yarn,factor=4,original=16", tied_embeddings=False)
    run = drawn_run(tmp_path / "run", dataclasses.replace(cfg, model=model))
    assert call("export", run, "--out", tmp_path / "out", monkeypatch=monkeypatch) == 0
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    capsys.readouterr()
    assert call("check", run, tmp_path / "out", monkeypatch=monkeypatch) == 0
    assert float(capsys.readouterr().out.splitlines()[1].split()[-1]) < 1e-4
    HubFolder(tmp_path / "out").check()


@pytest.mark.parametrize("changed", ["the file", "the class", "another file", "a repository"])
def test_check_runs_other_code_only_with_the_flag(changed, tmp_path, monkeypatch):
    """An exported folder with modified or additional code."""
    run, out = drawn_run(tmp_path / "run", small.nash_config()), tmp_path / "out"
    assert call("export", run, "--out", out, monkeypatch=monkeypatch) == 0
    code = "Path(__file__).with_name('was_run').touch()\n"
    values = json.loads((out / "config.json").read_text())
    if changed == "the file":
        (out / "modeling_nash_mhc.py").write_text(
            f"from pathlib import Path\n{code}" + (out / "modeling_nash_mhc.py").read_text()
        )
    else:
        names = {
            "the class": "modeling_nash_mhc.Other",
            "another file": "more.Other",
            "a repository": "a/b--modeling_nash_mhc.C",
        }
        values["auto_map"]["AutoModelForCausalLM"] = names[changed]
        (out / "more.py").write_text(f"from pathlib import Path\n{code}class Other: pass\n")
        (out / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        call("check", run, out, monkeypatch=monkeypatch)
    assert not (out / "was_run").exists()


def test_check_prints_the_difference_of_two_models(folders, tmp_path, monkeypatch, capsys):
    source = folders("qwen2, tied")
    call("import", source, "--out", tmp_path / "ours", monkeypatch=monkeypatch)
    capsys.readouterr()
    assert call("check", tmp_path / "ours", source, "--tokens", 40, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    figures = {line.rsplit(None, 1)[0].strip(): float(line.rsplit(None, 1)[1]) for line in said.splitlines()[1:]}
    assert "by nash_mhc" in said
    assert "by transformers" in said
    assert figures["largest difference"] < 1e-5
    assert figures["mean KL, nats"] < 1e-8
    assert figures["same choice"] == 1
    call("check", folders("qwen2, far, bfloat16"), source, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "nan" not in said
    assert float(said.splitlines()[1].split()[-1]) > 0.1


def broken(folder, change):
    """Rewrite the folder's weight file."""
    import torch
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    held = load_file(folder / "model.safetensors")
    change(held, torch)
    save_torch(held, folder / "model.safetensors", metadata={"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj.weight"
WRONG = {
    "missing": (lambda held, _: held.pop(DOWN), f"the tensor {DOWN} is missing"),
    "renamed": (lambda held, _: held.update({DOWN + "s": held.pop(DOWN)}), f"did you mean {DOWN}s?"),
    "extra": (lambda held, torch: held.update(odd=torch.zeros(3)), 'without the tensor "odd"'),
    "misshapen": (
        lambda held, torch: held.update({DOWN: torch.zeros(48, 32)}),
        f"{DOWN} has shape [48, 32], but config.json needs [32, 48]",
    ),
    "of whole numbers": (lambda held, torch: held.update({DOWN: held[DOWN].to(torch.int8)}), f"{DOWN} has dtype I8"),
}


@pytest.mark.parametrize("name", [*WRONG, "cut", "cut in its header", "no piece", "no JSON"])
def test_a_damaged_folder_is_refused_by_name_and_leaves_nothing(name, folders, tmp_path, monkeypatch):
    source = folders("llama, far, tied, bfloat16, in pieces" if name == "no piece" else "llama")
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    if name in WRONG:
        change, said = WRONG[name]
        broken(folder, change)
    elif name == "no piece":
        gone = sorted(folder.glob("*.safetensors"))[0]
        lost = next(
            k
            for k, v in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].items()
            if v == gone.name
        )
        gone.unlink()
        said = f'{gone.name}, which contains "{lost}", is missing'
    elif name == "no JSON":
        (folder / "config.json").write_text("{")
        said = "config.json: cannot be read"
    else:
        header = int.from_bytes(weights.read_bytes()[:8], "little")
        entries = json.loads(weights.read_bytes()[8 : 8 + header])
        assert DOWN in entries
        weights.write_bytes(weights.read_bytes()[: -1 if name == "cut" else 20])
        said = "model.safetensors: is damaged"
    with pytest.raises(ConfigError) as error:
        call("import", folder, "--out", tmp_path / "ours", monkeypatch=monkeypatch)
    assert said in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    cfg = small.config(train__init_from=str(folder), train__checkpoint_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError):
        check_resume(cfg, rows="stories")


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 300,
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), [
    ({"model_type": "gpt2"}, "model_type"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"attention_bias": True}, "attention_bias"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per-layer"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "one layer type"),
    ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "one layer type"),
    ({"vocab_size": None}, "config.json: vocab_size is null"),
    ({"num_key_value_heads": 3}, "config.json: model.kv_heads 3 does not divide model.heads 4"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "config.json: rope_scaling .* has no low_freq_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "many"}}, "config.json: rope_scaling: factor is \"many\""),
    ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}}, "no factor, .* = 2$"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling .* has no factor"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
    ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
])  # fmt: skip
def test_unsupported_settings_are_refused_by_name(changes, said):
    with pytest.raises(ConfigError, match=said):
        read_config(CONFIG | changes, "config.json")


@pytest.mark.parametrize("rope", [
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
])  # fmt: skip
def test_old_and_new_rope_settings_are_read(rope):
    found = read_config(CONFIG | rope, "config.json").model
    assert found.rope_theta == 5e5
    kind = (rope.get("rope_scaling") or rope.get("rope_parameters") or {}).get("rope_type", "linear")
    expected = {"linear": "linear,factor=4", "yarn": "yarn,factor=4,original=64"}[kind]
    assert found.rope_scaling == (expected if len(rope) > 1 or "rope_parameters" in rope else None)
    again = read_config(family_config(found, family_of(found), 128), "config.json").model
    assert again == found
    assert family_of(dataclasses.replace(found, scales=2)) is None


@pytest.mark.parametrize(("text", "said"), [
    ("ntk,factor=2", "the first word must be one of"),
    ("yarn,factor=2", "needs original="),
    ("linear,factor=0.5", "at least 1"),
    ("linear,factor=x", "must be a number"),
    ("linear,factor=2,low=1", "linear .*'low'"),
    ("llama3,factor=8,low=4,high=1,original=8192", "high must be above low"),
])  # fmt: skip
def test_an_invalid_rope_scaling_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(small.MODEL, rope_scaling=text)


def test_rope_scaling_round_trips():
    for text in ("linear,factor=4", "llama3,factor=8,low=1,high=4,original=8192", "yarn,factor=4,original=32768,slow=2"):
        assert str(RopeScaling.parse(text)) == text


def test_a_run_cannot_start_in_an_imported_directory(folders, tmp_path, monkeypatch):
    call("import", folders("qwen2, tied"), "--out", tmp_path / "ours", monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="holds an imported model"):
        at(tmp_path / "ours", small.config())
    with pytest.raises(ConfigError, match=r"--out .*ours: already exists"):
        call("import", folders("qwen2, tied"), "--out", tmp_path / "ours", monkeypatch=monkeypatch)
    cfg = parsing.parse(["--init-from", str(folders("qwen2, tied")), "--model-width", "64"], found=infer_settings).config
    with pytest.raises(ConfigError, match=r"model.width 64: .* has 32"):
        check_resume(cfg, rows="stories")


def test_a_folder_without_a_tokenizer_is_refused(folders, tmp_path):
    """transformers would create one with an empty vocabulary."""
    for file in folders("llama").iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="no tokenizer"):
        load(tmp_path)
    assert parsing.parse(["--init-from", str(tmp_path)], found=infer_settings).config.data.tokenizer == "bytes"


def test_an_exported_tokenizer_adds_the_begin_token_if_trained_with_it(folders, tmp_path):
    from nash_mhc.data.tokenizer import load_tokenizer

    values = json.loads((folders("llama") / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | {"post_processor": None}))
    plain = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for begins in (False, True):
        plain.save(tmp_path / str(begins), begins=begins)
        again = load_tokenizer(str(tmp_path / str(begins)))
        assert again.encode("one").tolist() == plain.encode("one").tolist() == list(b"one")
        assert (again.begin, again.end) == (plain.begin, plain.end) == (256, 256)
        assert again._inner("one")["input_ids"] == [256] * begins + list(b"one")


def test_a_tokenizer_with_a_begin_token_begins_every_document_with_it(folders, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    from nash_mhc.data.tokenizer import load_tokenizer

    folder = folders("llama")
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|begin|>"])
    inner.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 257)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "two"}) + "\n")
    plain, begun = load_tokenizer(str(folder)), load_tokenizer(str(tmp_path))
    assert (plain.begin, plain.end) == (256, 256)
    assert (begun.begin, begun.end) == (257, 256)
    from nash_mhc.config.schema import DataConfig
    from nash_mhc.data.sources import open_source

    data = DataConfig(
        dataset=str(tmp_path / "texts.jsonl"), tokenizer=str(tmp_path), seq_len=16, validation_fraction=0.0,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    rows = open_source(data, begun, split="train", seed=0).take([0])
    starts = np.flatnonzero(np.diff(rows.segments[0], prepend=0) > 0)
    assert rows.inputs[0][starts].tolist() == [257, 257]
    assert rows.targets[0][[3, 7]].tolist() == [256, 256]


MEMORY = """
import sys, threading
import jax
from nash_mhc.loading.load import on_devices
from nash_mhc.model.architectures import abstract_model
from nash_mhc.kits.hub.folder import HubFolder
from nash_mhc.kits.hub.folder import read_weights
from nash_mhc.config.schema import RunConfig, DataConfig
folder = HubFolder(sys.argv[1])
like = on_devices(abstract_model(folder.imported.model), None)
read_weights(folder, like)  # what the compiler needs it has then
folder = HubFolder(sys.argv[1])
anonymous = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch); thread.start()
model = read_weights(folder, like)
done.set(); thread.join()
held = sum(x.nbytes for x in jax.tree.leaves(model))
print(peak[0] - before - held)
"""


def test_import_needs_little_host_memory(tmp_path):
    """At most twice the largest tensor, beyond the arrays of the (emulated) devices."""
    config = CONFIG | {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = shapes(read_config(config, "").model)
    save_file({name: np.zeros(shape, np.float32) for name, shape in names.items()}, tmp_path / "model.safetensors")
    largest = 1024 * 8192 * 4
    at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back, and is not counted any more
    argv = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=at_once)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2 * largest, f"{int(done.stdout) / largest:.2f} times the largest tensor"
