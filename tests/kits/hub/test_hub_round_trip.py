"""Models of every family, imported, partly trained and exported: frozen tensors keep their bytes and dtypes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small
from hub_models import save_pieces, tensors
from runs import at, drawn_run
from safetensors.numpy import save_file

from nash_mhc.config import ConfigError, parsing
from nash_mhc.config.schema import MeshConfig, ModelConfig, RunConfig
from nash_mhc.kits.hub import command as hub
from nash_mhc.kits.hub.config_json import nash_config, read_config
from nash_mhc.kits.hub.folder import HubFolder, read_weights
from nash_mhc.kits.hub.tensors import shapes
from nash_mhc.kits.hub.tensors import tensors as tensors_of
from nash_mhc.kits.hub.writing import write_byte_tokenizer
from nash_mhc.loading.load import load
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.inferred_settings import infer_settings
from nash_mhc.train.resume import check_resume
from nash_mhc.train.state import sharded_abstract_state

SIZES = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 256,
}  # fmt: skip
NASH = ModelConfig(
    vocab_size=300, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, scales=2, ratio=2, window=8, conv_taps=2,
    streams=2, nash_iterations=1, rope_scaling="yarn,factor=2,original=32", tied_embeddings=False,
)  # fmt: skip
CONFIGS = {
    "llama": SIZES | {"model_type": "llama"},
    "nash_mhc": nash_config(NASH, max_position_embeddings=64, eos_token_id=256),
    "qwen2": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
# Files that a folder may have or not, and that nothing of ours reads.
OPTIONAL = (
    "chat_template.jinja", "additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "merges.txt", "vocab.json", "LICENSE", "USE_POLICY.md",
)  # fmt: skip


def call(*argv, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hub", *map(str, argv)])
    return hub.main()


def drawn_folder(folder, family, rng):
    """A model with a random dtype per tensor, while config.json has the right dtype, another one, or none."""
    folder.mkdir()
    said = {} if rng.random() < 0.3 else {str(rng.choice(["dtype", "torch_dtype"])): str(rng.choice(["bfloat16", "float32"]))}
    values = CONFIGS[family] | said
    (folder / "config.json").write_text(json.dumps(values, indent=int(rng.integers(1, 5))))
    held = {}
    wanted = shapes(read_config(values, "").model)
    if values.get("tie_word_embeddings") and rng.random() < 0.5:  # as some write it
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    for name, shape in wanted.items():
        held[name] = (0.3 * rng.normal(size=shape)).astype(DTYPES[rng.integers(3)])
        held[name].reshape(-1)[:3] = [-0.0, 6e-8, 1e-39]  # a zero with a sign, and some of the smallest of half and of float
    if "lm_head.weight" in held and values.get("tie_word_embeddings"):
        held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
    if rng.random() < 0.5:
        save_pieces(folder, held)
    else:
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 3], "top_k": int(rng.integers(9))}))
    for name in OPTIONAL:
        if rng.random() < 0.5:
            (folder / name).parent.mkdir(exist_ok=True)
            text = rng.bytes(50) if name == "tokenizer.model" else b'{"bos_token": "<|endoftext|>"}\n'
            (folder / name).write_bytes(text if name.endswith((".model", "map.json")) else b"{}\n")
    return folder


def small_files(folder):
    """Return the files other than weights, code and model card."""
    found = (path for path in folder.rglob("*") if path.is_file() and "safetensors" not in path.name)
    kept = (path for path in found if path.suffix != ".py" and path.name != "README.md")
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def trained(source, folder, pattern):
    """Train two steps from that model, with only these parameters trainable."""
    argv = ["--init-from", str(source), "--train-only", pattern, "--seq-len", "32", "--batch-size", "2", "--total-steps", "2"]
    argv += ["--warmup-steps", "0", "--eval-interval", "0", "--learning-rate", "0.05", "--sample-tokens", "0"]
    argv += ["--mesh-data", "1", "--schedule", "constant"]
    return at(folder, parsing.parse(argv, found=infer_settings).config, evaluated=False).folder


def test_import_and_export_preserve_bytes_dtypes_and_files(tmp_path, monkeypatch):
    """Without a training step."""
    for seed, family in enumerate(CONFIGS):
        there = drawn_folder(tmp_path / family, family, np.random.default_rng(seed))
        call("import", there, "--out", tmp_path / f"{family} ours", monkeypatch=monkeypatch)
        call("export", tmp_path / f"{family} ours", "--out", tmp_path / f"{family} back", monkeypatch=monkeypatch)
        assert tensors(tmp_path / f"{family} back") == tensors(there)
        assert small_files(tmp_path / f"{family} back") == small_files(there)


LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(4, 44))]


@pytest.mark.parametrize("seed", [1, *LONG])
def test_frozen_tensors_are_byte_equal(seed, tmp_path, monkeypatch):
    family = tuple(CONFIGS)[seed % 4]
    pattern, learned = (("layers.ffn.*", ".mlp."), ("layers.attention_norm.*", "input_layernorm"))[seed // 4 % 2]
    if family == "nash_mhc":
        learned = {".mlp.": ".ffn.", "input_layernorm": ".attention_norm."}[learned]
    rng = np.random.default_rng(seed)
    source = there = drawn_folder(tmp_path / "there", family, rng)
    if rng.random() < 0.5:  # from a folder of ours, into which it was imported
        call("import", there, "--out", tmp_path / "ours", monkeypatch=monkeypatch)
        source = tmp_path / "ours"
    run = trained(source, tmp_path / "run", pattern)
    call("export", run, "--out", tmp_path / "back", monkeypatch=monkeypatch)
    before, after = tensors(there), tensors(tmp_path / "back")
    assert {name: kind[:2] for name, kind in after.items()} == {name: kind[:2] for name, kind in before.items()}
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all(learned in name for name in changed)
    assert small_files(tmp_path / "back") == small_files(there)
    call("import", tmp_path / "back", "--out", tmp_path / "again", monkeypatch=monkeypatch)
    call("export", tmp_path / "again", "--out", tmp_path / "end", monkeypatch=monkeypatch)
    assert tensors(tmp_path / "end") == after and small_files(tmp_path / "end") == small_files(there)
    # One dtype for all, where it is asked for, and said so.
    call("export", run, "--out", tmp_path / "wide", "--dtype", "float32", monkeypatch=monkeypatch)
    assert {kind for kind, *_ in tensors(tmp_path / "wide").values()} == {"F32"}
    said = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert said.get("dtype", said.get("torch_dtype")) == "float32"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a run with unusual settings, and its exported folder."""
    root = tmp_path_factory.mktemp("ours")
    cfg = small.nash_config()
    model = dataclasses.replace(cfg.model, rope_scaling="yarn,factor=4,original=16")
    run = drawn_run(root / "run", dataclasses.replace(cfg, model=model))
    with pytest.MonkeyPatch.context() as patch:
        call("export", run, "--out", root / "out", monkeypatch=patch)
    return run, root / "out"


def test_a_nash_mhc_export_is_read_back_bit_for_bit(exported, tmp_path, monkeypatch):
    run, folder = exported
    one, other = load(run), load(folder)
    assert other.config.model == one.config.model
    assert (other.tokenizer.begin, other.tokenizer.end) == (one.tokenizer.begin, one.tokenizer.end)
    cut = lambda a: a[: one.config.model.vocab_size] if a.shape[0] == one.config.model.padded_vocab else a
    for a, b in zip(*map(jax.tree.leaves, (one.model, other.model)), strict=True):
        np.testing.assert_array_equal(np.asarray(cut(a)), np.asarray(cut(b)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 64)), jnp.int32)
    forward = jax.jit(lambda model, tokens: model(tokens)[..., :257])
    np.testing.assert_array_equal(*(np.asarray(forward(found.model, tokens)) for found in (one, other)))
    call("export", folder, "--out", tmp_path / "again", monkeypatch=monkeypatch)
    for file in folder.iterdir():
        if file.name != "README.md":
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_a_mesh_reads_a_nash_mhc_export(exported):
    """Including the residual maps, whose shards are not contiguous in the file."""
    folder = HubFolder(exported[1])
    cfg = RunConfig(model=folder.imported.model, mesh=MeshConfig(data=2, fsdp=2, tp=2))
    spread = read_weights(folder, sharded_abstract_state(cfg, make_mesh(cfg.mesh)).model)
    for a, b in zip(*map(jax.tree.leaves, (spread, load(folder.path).model)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_run_starts_from_a_nash_mhc_export(exported):
    cfg = parsing.parse(["--init-from", str(exported[1]), "--seq-len", "32"], found=infer_settings).config
    assert cfg.model == load(exported[0]).config.model
    check_resume(cfg, rows="stories")


@pytest.mark.parametrize(("change", "said"), [
    ({"rope_scaling_text": None}, "export the run again"),
    ({"rope_amplitude": 2.0}, "rope_amplitude"),
    ({"rope_multipliers": 3}, "rope_multipliers"),
    ({"width": "64"}, "model.width"),
    ({"residual": ["mhc"]}, "model.residual"),
    ({"streams": 3}, "config.json needs"),
    ({"scales": 1, "residual": "plain", "conv_taps": 0}, "not a Nash-MHC model"),
])  # fmt: skip
def test_a_changed_nash_mhc_config_is_refused(change, said, exported, tmp_path):
    for file in exported[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ConfigError, match=said):
        HubFolder(tmp_path).check()


def test_every_parameter_has_an_exported_tensor():
    """For every kind of architecture: all parameters are exported, under distinct names."""
    from nash_mhc.model.architectures import abstract_model
    from nash_mhc.parallel.params import named_leaves

    for changes in ({}, {"tied_embeddings": True}, {"residual": "mhc"}, {"qkv_bias": True, "conv_taps": 0}, {"scales": 1}):
        cfg = ModelConfig(**vars(NASH) | changes)
        found = tensors_of(cfg)
        assert {tensor.parameter for tensor in found} == set(named_leaves(abstract_model(cfg)))
        assert len({tensor.name for tensor in found}) == len(found)
