"""PEFT adapters: imported, exported and merged, they give the same model."""

import dataclasses
import json
import shutil
import sys
import warnings

import jax
import numpy as np
import pytest
import small
from hub_models import KINDS, save, tensors
from runs import drawn_run

from nash_mhc.config import parsing
from nash_mhc.config.schema import ConfigError
from nash_mhc.kits.hub import command
from nash_mhc.kits.hub.adapter_config import HANDLED, IGNORED, REFUSED
from nash_mhc.loading.load import load
from nash_mhc.model.lora import merged
from nash_mhc.storage.folders import check_model_folder
from nash_mhc.train.inferred_settings import infer_settings

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


@pytest.fixture(scope="module", autouse=True)
def theirs_are_imported():
    """Import torch only in the worker that runs these tests, because it takes seconds."""
    torch = pytest.importorskip("torch", reason="compares with PEFT, which needs torch: pip install 'torch<2.14'")
    peft = pytest.importorskip("peft", reason="compares with PEFT: pip install peft")
    import transformers

    torch.set_num_threads(1)
    globals().update(torch=torch, peft=peft, transformers=transformers)


def call(*argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hub", *map(str, argv)])
        return command.main()


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens, np.int64))).logits.numpy()


def their_adapters(base, folder, **settings):
    """Create adapters with PEFT and randomize B, and A where it starts at zero."""
    torch.manual_seed(1)
    common = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about saving what these tests save
        model = peft.get_peft_model(read(base), peft.LoraConfig(**common | settings))
        for name, parameter in model.named_parameters():
            if "lora_B" in name or ("lora_A" in name and not parameter.any()):
                parameter.data = 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=["qwen2, tied", "nash"])
def models(request, tmp_path_factory):
    """Return the base as nash_mhc and as transformers read it."""
    folder = tmp_path_factory.mktemp("adapters")
    if request.param != "nash":
        base = save(folder / "base", KINDS[request.param])
        return base, base
    run = drawn_run(folder / "base", small.nash_config())
    call("export", run, "--out", folder / "exported")
    return run, folder / "exported"


def test_peft_adapters_import_export_and_merge(models, tmp_path):
    base, by_transformers = models
    theirs = their_adapters(by_transformers, tmp_path / "theirs", use_rslora=True)
    call("import", tmp_path / "theirs", "--base", base, "--out", tmp_path / "ours")
    loaded = load(tmp_path / "ours")
    tokens = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)
    expected = logits(theirs, tokens)
    found = jax.jit(lambda model, tokens_BT: model(tokens_BT))(loaded.model, tokens)[..., : expected.shape[-1]]
    check_model_folder("", str(tmp_path / "theirs"))
    unimported = load(tmp_path / "theirs")  # adapter_config.json names the base
    np.testing.assert_allclose(forward(unimported.model, tokens)[..., : expected.shape[-1]], expected, atol=1e-5, rtol=1e-5)
    assert unimported.stops == load(by_transformers).stops and unimported.config.lora == loaded.config.lora
    plain = logits(read(by_transformers), tokens)
    assert np.abs(expected - plain).max() > 0.1  # they do something
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)

    call("export", tmp_path / "ours", "--out", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(tmp_path / "theirs")
    again = peft.PeftModel.from_pretrained(read(by_transformers), tmp_path / "back").eval()
    np.testing.assert_allclose(logits(again, tokens), expected, atol=1e-6)

    call("merge", tmp_path / "ours", "--out", tmp_path / "merged")
    np.testing.assert_allclose(logits(read(tmp_path / "merged"), tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(tmp_path_factory.mktemp("plain") / "base", KINDS["llama"])


@pytest.fixture(scope="module")
def theirs(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "theirs"
    their_adapters(base, folder)
    return folder


def change(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_every_field_of_peft_is_handled_refused_or_ignored():
    lists = [HANDLED, frozenset(REFUSED), IGNORED]
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == frozenset.union(*lists)
    assert sum(map(len, lists)) == len(frozenset.union(*lists))  # no field is in two of them
    plain = peft.LoraConfig(task_type="CAUSAL_LM", peft_type="LORA").to_dict()
    assert [name for name, values in REFUSED.items() if plain[name] not in values] == []


RANKS = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 9}}
ALPHAS = {"alpha_pattern": {"v_proj": 1, "^model.layers.0.*o_proj": 17}}
# By the names of the fields; each field is compared in every run of the tests.
ACCEPTED = {
    "peft_type, r, lora_alpha, lora_dropout": {"r": 7, "lora_alpha": 5, "lora_dropout": 0.5},
    "use_rslora, rank_pattern, alpha_pattern": {"use_rslora": True} | RANKS | ALPHAS,
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "init_lora_weights, use_rslora, rank_pattern": {
        "init_lora_weights": "olora", "use_rslora": True, "rank_pattern": {"o_proj": 3}
    },
    "target_modules": {"target_modules": r".*\.0\..*(q|up)_proj"},
    "exclude_modules": {"exclude_modules": ["layers.0.self_attn.v_proj"]},
    "layers_pattern, layers_to_transform, init_lora_weights": {
        "layers_to_transform": 0, "layers_pattern": "layers", "init_lora_weights": "pissa"
    },
}  # fmt: skip
# Each field alone, and more of its values.
LONG = [
    {"r": 7}, {"lora_alpha": 5}, {"lora_dropout": 0.5}, {"use_rslora": True}, RANKS, ALPHAS | {"use_rslora": True},
    *({"init_lora_weights": name} for name in ("gaussian", "orthogonal", "mica")),
    {"target_modules": "all-linear"}, {"layers_to_transform": [1]},
]  # fmt: skip
CASES = [*ACCEPTED.values(), *(pytest.param(settings, marks=pytest.mark.long) for settings in LONG)]


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: " ".join(map(str, settings.values()))[:40])
def test_a_handled_field_has_the_same_effect_as_in_peft(base, tmp_path, settings):
    theirs = their_adapters(base, tmp_path / "theirs", **settings)
    call("import", tmp_path / "theirs", "--base", base, "--out", tmp_path / "ours")
    tokens = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)
    expected = logits(theirs.merge_and_unload(), tokens)
    assert np.abs(expected - logits(read(base), tokens)).max() > 0.05
    found = forward(merged(load(tmp_path / "ours").model), tokens)[..., : expected.shape[-1]]
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)

    call("export", tmp_path / "ours", "--out", tmp_path / "back")
    again = peft.PeftModel.from_pretrained(read(base), tmp_path / "back").eval()
    np.testing.assert_allclose(logits(again, tokens), expected, atol=2e-5, rtol=1e-5)


@jax.jit
def forward(model, tokens_BT):
    return model(tokens_BT)


def test_every_handled_field_is_compared_with_peft():
    assert {name for names in ACCEPTED for name in names.split(", ")} == HANDLED
    assert all(set(settings) <= set(names.split(", ")) for names, settings in ACCEPTED.items())


MORE = {
    "task_type": "SEQ_CLS", "bias": "all", "fan_in_fan_out": True, "modules_to_save": ["lm_head"], "use_dora": True,
    "use_qalora": True, "lora_bias": True, "layer_replication": [[0, 2], [1, 2]], "target_parameters": ["mlp.experts"],
    "trainable_token_indices": [1, 2], "alora_invocation_tokens": [7], "megatron_config": {"hidden_size": 8},
    "velora_config": {"scale": 1.0}, "monteclora_config": {"use_entropy": True}, "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 3}, "kasa_config": {"beta": 1e-4},
}  # fmt: skip
# Values that mean something else, or nothing.
BAD = [
    *MORE.items(),
    *(("init_lora_weights", value) for value in ("pissa_niter_16", "loftq", "corda", "lora_ga", "unheard_of", 1)),
    *(("r", value) for value in (0, -1, 1.5, True, None, "8", 10**30)),
    *(("lora_alpha", value) for value in (0, None, float("nan"), 10**400, [])),
    ("peft_type", "IA3"), ("lora_dropout", 2), ("use_rslora", "yes"), ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"(": 2}), ("alpha_pattern", ["q_proj"]), ("alpha_pattern", {"q_proj": None}),
    ("target_modules", 3), ("target_modules", "("), ("target_modules", ["q_proj"]), ("exclude_modules", ["v_proj"]),
    ("layers_to_transform", [0]), ("layers_to_transform", [0.5]), ("layers_pattern", [3]), ("a_field_of_tomorrow", 1),
]  # fmt: skip


def test_every_refused_field_is_tried():
    assert MORE.keys() == REFUSED.keys()


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: str(value)[:20])
def test_fields_beyond_plain_lora_are_refused_by_name(base, theirs, tmp_path, field, value):
    changed = shutil.copytree(theirs, tmp_path / "theirs")
    change(changed, **{field: value})
    with pytest.raises(ConfigError, match=rf"\b{field}\b") as raised:
        call("import", changed, "--base", base, "--out", tmp_path / "ours")
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(("settings", "said"), [
    ({"target_modules": ["q_proj", "lm_head"]}, r"lm_head; only adapters on .*q_proj"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, r"embed_tokens; only adapters on .*q_proj"),
])  # fmt: skip
def test_an_adapter_outside_the_layers_is_refused_by_name(base, tmp_path, settings, said):
    their_adapters(base, tmp_path / "theirs", **settings)
    with pytest.raises(ConfigError, match=said):
        call("import", tmp_path / "theirs", "--base", base, "--out", tmp_path / "ours")


def test_each_tensor_is_exported_in_its_imported_dtype(base, theirs, tmp_path):
    from safetensors.torch import load_file, save_file

    mixed = shutil.copytree(theirs, tmp_path / "theirs")
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    held = load_file(mixed / "adapter_model.safetensors")
    save_file({name: held[name].to(kinds[i % 3]) for i, name in enumerate(held)}, mixed / "adapter_model.safetensors")
    call("import", mixed, "--base", base, "--out", tmp_path / "ours")
    call("export", tmp_path / "ours", "--out", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(mixed)
    call("export", tmp_path / "ours", "--out", tmp_path / "wide", "--dtype", "float32")
    assert {kind for kind, *_ in tensors(tmp_path / "wide").values()} == {"F32"}


WRONG = {
    "rank": (lambda folder: change(folder, r=8), r"lora_A.weight has shape \[4, 32\], .*need \[8, 32\]"),
    "no file": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "cut": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"cut"), "cannot be read"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_damaged_adapters_are_refused_and_leave_nothing(base, theirs, tmp_path, name):
    broken = shutil.copytree(theirs, tmp_path / "theirs")
    damage, said = WRONG[name]
    damage(broken)
    with pytest.raises(ConfigError, match=said):
        call("import", broken, "--base", base, "--out", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_the_wrong_kind_of_folder_is_refused(base, theirs, tmp_path):
    with pytest.raises(ConfigError, match="--base"):
        call("import", theirs, "--out", tmp_path / "ours")
    with pytest.raises(ConfigError, match="hub merge"):
        call("export", theirs, "--out", tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"--init-from .*theirs: a run cannot start from .*hub import"):
        parsing.parse(["--init-from", str(theirs)], found=infer_settings)
    moved = shutil.copytree(theirs, tmp_path / "moved")
    change(moved, base_model_name_or_path="nowhere")
    with pytest.raises(ConfigError, match=r"nowhere.*hub import \S+ --base"):
        load(moved)
    with pytest.raises(ConfigError, match="contains no adapters"):
        call("import", base, "--base", base, "--out", tmp_path / "ours")
    with pytest.raises(ConfigError, match="has no adapters"):
        call("merge", base, "--out", tmp_path / "merged")
    wider = save(tmp_path / "wider", KINDS["llama"], hidden_size=64)
    with pytest.raises(ConfigError, match=r"need \[4, 64\]"):
        call("import", theirs, "--base", wider, "--out", tmp_path / "ours")
    call("import", theirs, "--base", base, "--out", tmp_path / "ours")
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        call("export", tmp_path / "ours", "--out", tmp_path / "back", "--dtype", "bfloat16")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    with pytest.raises(ConfigError, match="sha256"):
        load(tmp_path / "ours")
