"""Adapters in PEFT's files, both ways, and merged: always the same model."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest
import small
from hub_models import KINDS, save, tensors
from runs import drawn_run

from nash_mhc.config.schema import ConfigError
from nash_mhc.hub import __main__ as command
from nash_mhc.hub.load import load

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


@pytest.fixture(scope="module", autouse=True)
def theirs_are_imported():
    """By the one worker that runs these tests, not by all that look for some: it takes seconds."""
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
    """Made and taught by PEFT: B is drawn."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(read(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=["qwen2, tied", "nash"])
def models(request, tmp_path_factory):
    """(base as we read it, base as transformers does)"""
    folder = tmp_path_factory.mktemp("adapters")
    if request.param != "nash":
        base = save(folder / "base", KINDS[request.param])
        return base, base
    run = drawn_run(folder / "base", small.nash_config())
    call("export", run, "--out", folder / "exported")
    return run, folder / "exported"


def test_adapters_of_theirs_are_ours_and_go_back_and_make_one_model(models, tmp_path):
    base, by_transformers = models
    theirs = their_adapters(by_transformers, tmp_path / "theirs", use_rslora=True)
    call("import", tmp_path / "theirs", "--base", base, "--out", tmp_path / "ours")
    loaded = load(tmp_path / "ours")
    tokens = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)
    expected = logits(theirs, tokens)
    found = jax.jit(lambda model, tokens_BT: model(tokens_BT))(loaded.model, tokens)[..., : expected.shape[-1]]
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


WRONG = {
    "use_dora": (lambda folder: change(folder, use_dora=True), "use_dora true is more than plain LoRA"),
    "modules": (lambda folder: change(folder, modules_to_save=["lm_head"]), "modules_to_save"),
    "rank": (lambda folder: change(folder, r=8), r"lora_A.weight is \[4, 32\], and .* asks for \[8, 32\]"),
    "no file": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "cut": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"cut"), "cannot be read"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be understood"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_taken_is_refused_and_leaves_nothing(base, theirs, tmp_path, name):
    broken = shutil.copytree(theirs, tmp_path / "theirs")
    damage, said = WRONG[name]
    damage(broken)
    with pytest.raises(ConfigError, match=said):
        call("import", broken, "--base", base, "--out", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_is_asked_of_the_wrong_folder_is_refused(base, theirs, tmp_path):
    with pytest.raises(ConfigError, match="name the model that they belong to with --base"):
        call("import", theirs, "--out", tmp_path / "ours")
    with pytest.raises(ConfigError, match="holds no adapters"):
        call("import", base, "--base", base, "--out", tmp_path / "ours")
    with pytest.raises(ConfigError, match="has no adapters; python"):
        call("merge", base, "--out", tmp_path / "merged")
    wider = save(tmp_path / "wider", KINDS["llama"], hidden_size=64)
    with pytest.raises(ConfigError, match="asks for"):
        call("import", theirs, "--base", wider, "--out", tmp_path / "ours")
    call("import", theirs, "--base", base, "--out", tmp_path / "ours")
    with pytest.raises(ConfigError, match="adapters are float32"):
        call("export", tmp_path / "ours", "--out", tmp_path / "back", "--dtype", "bfloat16")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    with pytest.raises(ConfigError, match="its files have another hash"):
        load(tmp_path / "ours")
