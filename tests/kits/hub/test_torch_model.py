"""The torch file of an exported model has the same logits as ours, with and without padding and cache."""

import ast
import dataclasses
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small
from safetensors.numpy import save_file
from sampled import long

from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.kits.hub.config_json import nash_config
from nash_mhc.kits.hub.tensors import export_tensors, tensors_of
from nash_mhc.model import LM
from nash_mhc.model.protocol import Execution
from nash_mhc.parallel.params import named_leaves


@pytest.fixture(scope="module", autouse=True)
def torch_is_imported():
    """Import torch only in the worker that runs these tests, because it takes seconds."""
    torch = pytest.importorskip("torch", reason="the exported model is a torch file, and torch is not installed")
    # Before the file under test: what a module with type checks imports first is compiled anew, for seconds.
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401

    from nash_mhc.kits.hub import modeling_nash_mhc  # needs torch

    torch.set_num_threads(1)  # of numbers this few, a second one is only waited for
    globals().update(torch=torch, modeling_nash_mhc=modeling_nash_mhc)


BASE = dataclasses.replace(small.NASH, vocab_size=40, width=16, heads=4, kv_heads=4, ffn=24, nash_iterations=2)
# Every option that the architecture has appears with another value somewhere.
CONFIGS: dict[str, dict[str, Any]] = {
    "whole": {"scales": 4, "window": 8},
    "grouped, no window, biased, plain": {
        "kv_heads": 2, "window": None, "qkv_bias": True, "qk_norm": False, "tied_embeddings": False, "residual": "plain",
    },
    "ratio 3, convex, two streams": {"ratio": 3, "window": 9, "aggregation": "convex", "conv_taps": 1, "streams": 2},
    "mean, one layer in two without a window": {
        "scales": 2, "ratio": 4, "window": 4, "aggregation": "mean", "kv_heads": 1, "layers": 4, "full_every": 2,
    },
    "one scale, window": {"scales": 1, "window": 5, "streams": 3, "rope_theta": 100.0, "residual": "mhc-layer"},
    "dense": {"scales": 1, "window": None, "conv_taps": 0, "residual": "plain", "norm_eps": 1e-3},
}  # fmt: skip
# The others are seconds of the compiler each; test_hub_import has biases and grouped heads, too.
NAMES = [
    pytest.param(name, marks=[pytest.mark.long] * name.startswith(("grouped", "ratio 3", "one scale"))) for name in CONFIGS
]
T = 45  # several of the coarsest blocks and of the windows, and no multiple of a stride


def config(name: str) -> ModelConfig:
    return dataclasses.replace(BASE, **CONFIGS[name])


@functools.cache
def ours(name: str) -> LM:
    """Randomize every parameter: one that starts at 0, 1 or the identity would not be missed if left out."""
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: LM.init(config(name), key=jax.random.key(0))))
    return jax.tree.unflatten(tree, [rng.normal(0.1, 0.4, leaf.shape).astype(np.float32) for leaf in leaves])


@functools.cache
def exported(name: str) -> dict[str, np.ndarray]:
    return dict(export_tensors(named_leaves(ours(name)), config(name).layers, tensors_of(config(name), is_plain=False)))


def torch_model(name: str, change: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return the torch model with some tensors and configuration fields changed."""
    settings = modeling_nash_mhc.NashMhcConfig(**nash_config(config(name)) | fields)
    model = modeling_nash_mhc.NashMhcForCausalLM(settings).eval()
    state = {key: torch.tensor(value) for key, value in (exported(name) | (change or {})).items()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert missing.missing_keys == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    return model


@functools.cache
def tokens(name: str) -> np.ndarray:
    return np.random.default_rng(2).integers(0, config(name).vocab_size, (3, T))


@functools.cache
def expected(name: str) -> np.ndarray:
    """Return the logits of the JAX model; attention is causal, so they also hold for shorter texts."""
    run = jax.jit(lambda model, tokens_BT: model(tokens_BT, execution=Execution("float32", attention="reference")))
    return np.asarray(run(ours(name), tokens(name).astype(np.int32)))


def padded(name: str, lengths: tuple[int, ...], lefts: tuple[int, ...]) -> tuple[Any, Any]:
    """Return tokens and mask of texts with `lefts` padding before them and the rest after. Padding is random tokens."""
    rng, size = np.random.default_rng(3), max(map(sum, zip(lengths, lefts, strict=True)))
    ids, mask = rng.integers(0, config(name).vocab_size, (len(lengths), size)), np.zeros((len(lengths), size), np.int64)
    for row, (length, left) in enumerate(zip(lengths, lefts, strict=True)):
        ids[row, left : left + length] = tokens(name)[row, :length]
        mask[row, left : left + length] = 1
    return torch.tensor(ids), torch.tensor(mask)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a.detach().numpy() if torch.is_tensor(a) else a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_torch_logits_equal_jax(name: str) -> None:
    with torch.no_grad():
        close(torch_model(name)(torch.tensor(tokens(name))).logits, expected(name))


@pytest.mark.parametrize("name", NAMES)
def test_padding_does_not_change_logits(name: str) -> None:
    lengths, lefts = (T, 30, 17), (0, T - 30, 7)
    ids, mask = padded(name, lengths, lefts)
    with torch.no_grad():
        logits = torch_model(name)(ids, attention_mask=mask).logits
    for row, (length, left) in enumerate(zip(lengths, lefts, strict=True)):
        close(logits[row, left : left + length], expected(name)[row, :length])


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_accepts_any_number_of_tokens(name: str) -> None:
    lengths, lefts = (T, 38, 31), (0, T - 38, 3)
    ids, mask = padded(name, lengths, lefts)
    model, cache, logits, cfg = torch_model(name), None, [], config(name)
    with torch.no_grad():
        for start, end in itertools.pairwise([0, 11, 12, *range(19, 31), *range(40, T + 1)]):
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            cache, _ = out.past_key_values, logits.append(out.logits)
            assert cache.get_seq_length() == end
    for row, (length, left) in enumerate(zip(lengths, lefts, strict=True)):
        close(torch.cat(logits, 1)[row, left : left + length], expected(name)[row, :length])
    # A window's worth of tokens and the rows of coarser scales: what a token costs is what it looks at.
    sizes = {key: rows.shape[1] for key, rows in cache.layers[0].rows.items()}
    assert sizes["keys0"] == sizes["values0"] == (T if cfg.window is None else cfg.window - 1)
    for c, stride in enumerate(cfg.strides[1:], 1):
        assert sizes[f"keys{c}"] == sizes[f"values{c}"] == T // stride
        assert sizes[f"k_below{c}"] == sizes[f"v_below{c}"] == 2 * cfg.ratio - 1


@pytest.mark.parametrize("name", ["whole", *long(*(name for name in CONFIGS if name != "whole"))])  # the cache is tested above
def test_generation_is_equal_with_and_without_a_cache(name: str) -> None:
    model, new = torch_model(name), 20
    ids, mask = padded(name, (9, 4, 1), (0, 5, 8))
    # Weights that were drawn like to say one word for ever; no pair may come twice.
    settings = {"max_new_tokens": new, "min_new_tokens": new, "no_repeat_ngram_size": 2, "pad_token_id": 0}
    cached = model.generate(ids, attention_mask=mask, use_cache=True, **settings)
    assert cached.shape == (3, 9 + new) and min(len(set(row.tolist())) for row in cached[:, 9:]) > 5
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **settings))


def test_generation_reads_one_token_per_step_and_beams_reorder_the_cache() -> None:
    model = torch_model("whole")
    ids, mask = padded("whole", (9, 4), (0, 5))
    read = []
    model.model.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "no_repeat_ngram_size": 2, "num_beams": 3, "pad_token_id": 0}
    cached = model.generate(ids, attention_mask=mask, **settings)
    assert read == [9] + [1] * 19
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **settings))


def test_query_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_nash_mhc, "QUERY_CHUNK", 7)
    ids, mask = padded("whole", (T, 30), (0, 4))
    with torch.no_grad():
        logits = torch_model("whole")(ids, attention_mask=mask).logits
    close(logits[0], expected("whole")[0])
    close(logits[1, 4:34], expected("whole")[1, :30])


def test_scaled_frequencies_amplitudes_and_embeddings() -> None:
    """Each change is equivalent to one of the weights."""
    name = "one scale, window"
    cfg, ids = config(name), torch.tensor(tokens(name))
    half = cfg.head_dim // 2
    from_other_theta = [(cfg.rope_theta / 1e4) ** (-i / half) for i in range(half)]
    table = exported(name)["model.embed_tokens.weight"]
    longer = {k: 1.5 * v for k, v in exported(name).items() if "q_norm" in k or "k_norm" in k}
    with torch.no_grad():
        close(torch_model(name, rope_theta=1e4, rope_multipliers=from_other_theta)(ids).logits, expected(name))
        close(torch_model(name, rope_amplitude=1.5)(ids).logits, torch_model(name, longer)(ids).logits)
        as_it_is = torch_model(
            name,
            {"model.embed_tokens.weight": table * cfg.width**0.5, "lm_head.weight": table},
            embed_scale="table",
            tied_embeddings=False,
        )
        close(as_it_is(ids).logits, expected(name))


def test_every_parameter_has_a_gradient() -> None:
    model, ids = torch_model("whole").train(), torch.tensor(tokens("whole"))
    loss = model(ids, labels=ids).loss
    loss.backward()
    logits = expected("whole")[:, :-1]
    log_sums = np.log(np.sum(np.exp(logits), axis=-1))
    right = np.take_along_axis(logits, tokens("whole")[:, 1:, None], axis=-1)[..., 0]
    close(loss, np.mean(log_sums - right))
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0, name


def test_hidden_states_and_tuples_on_request() -> None:
    """One more than layers, in the order of the input tokens, even with padding on the left."""
    model = torch_model("whole")
    ids, mask = padded("whole", (9, 4), (0, 5))
    with torch.no_grad():
        plain = model(ids, attention_mask=mask)
        shown = model(ids, attention_mask=mask, output_hidden_states=True)
        held = model(ids, attention_mask=mask, return_dict=False)
        model.config.output_hidden_states = True
        by_config = model.model(ids, attention_mask=mask, return_dict=False)
    assert plain.hidden_states is None and len(shown.hidden_states) == config("whole").layers + 1
    assert torch.equal(shown.logits, plain.logits) and torch.equal(model.lm_head(shown.hidden_states[-1]), plain.logits)
    entered = config("whole").width ** 0.5 * model.model.embed_tokens(ids).detach()
    close(shown.hidden_states[0], config("whole").streams * entered)
    assert isinstance(held, tuple) and torch.equal(held[0], plain.logits) and type(held[1]).__name__ == "NashMhcCache"
    assert isinstance(by_config, tuple) and torch.equal(by_config[2][1], shown.hidden_states[1])
    alone = torch_model("whole")(ids[1:, 5:], output_hidden_states=True).hidden_states
    close(shown.hidden_states[1][1:, 5:], alone[1].detach())
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)


def test_an_empty_transformers_cache_is_converted() -> None:
    """An empty cache can be passed and reused across calls; one with keys is refused."""
    from transformers import DynamicCache

    model, ids, cache = torch_model("whole"), torch.tensor(tokens("whole")), DynamicCache()
    with torch.no_grad():
        first = model(ids[:, :20], past_key_values=cache)
        second = model(ids[:, 20:], past_key_values=cache)
    assert first.past_key_values is second.past_key_values is cache and cache.get_seq_length() == T
    close(torch.cat([first.logits, second.logits], dim=1), expected("whole"))
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    made = model.generate(ids[:1, :9], past_key_values=DynamicCache(config=model.config), **settings)
    assert torch.equal(made, model.generate(ids[:1, :9], **settings))
    used = DynamicCache()
    used.update(torch.zeros(3, 1, 2, 4), torch.zeros(3, 1, 2, 4), 0)
    with pytest.raises(ValueError, match="DynamicCache"):
        model(ids, past_key_values=used)


def test_position_ids_are_refused() -> None:
    ids = torch.tensor(tokens("dense"))
    with pytest.raises(ValueError, match="position_ids"):
        torch_model("dense")(ids, position_ids=ids)


def test_an_unknown_parameter_is_named() -> None:
    named = named_leaves(ours("dense")) | {"layers.ffn.up_DF.down": np.zeros(3)}
    with pytest.raises(ConfigError, match=r"layers\.ffn\.up_DF\.down cannot be exported"):
        next(export_tensors(named, 2, tensors_of(config("dense"), is_plain=False)))


def test_the_torch_file_imports_only_torch_and_transformers() -> None:
    nodes = list(ast.walk(ast.parse(Path(modeling_nash_mhc.__file__).read_text())))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in named} == {"math", "typing", "torch", "transformers"}


_ELSEWHERE = """
import sys
sys.modules["nash_mhc"] = sys.modules["jax"] = None  # as if they were not installed
import numpy as np, torch
from transformers import AutoModelForCausalLM
folder, again, tokens, results = sys.argv[1:]
load = lambda folder, **options: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)
ids = torch.tensor(np.load(tokens))
model = load(folder)
assert model.dtype == torch.float32 and not model.training
model.save_pretrained(again)
half = load(folder, dtype=torch.bfloat16)
assert half.dtype == half.lm_head.weight.dtype == torch.bfloat16
assert half.model.layers[0].attention.tau.dtype == half.model.norm.weight.dtype == torch.float32
settings = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0)
text = half.generate(ids[:, :5], output_logits=True, return_dict_in_generate=True, **settings)
assert text.sequences.shape == (3, 35) and all(torch.isfinite(x).all() for x in text.logits)
with torch.no_grad():
    np.savez(results, once=model(ids).logits, twice=load(again)(ids).logits, half=half(ids).logits.float())
"""


def test_an_export_loads_without_nash_mhc_installed(tmp_path: Path) -> None:
    name, folder = "whole", tmp_path / "model"
    folder.mkdir()
    save_file(exported(name), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(nash_config(config(name), dtype="float32")))
    shutil.copy(modeling_nash_mhc.__file__, folder)
    np.save(tmp_path / "tokens.npy", tokens(name))
    env = {n: v for n, v in os.environ.items() if not n.startswith(("HF_", "PYTHON"))}
    env |= {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_MODULES_CACHE": str(tmp_path / "hf_modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    paths = [str(tmp_path / part) for part in ("model", "again", "tokens.npy", "logits.npz")]
    command = [sys.executable, "-I", "-c", _ELSEWHERE, *paths]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    got = np.load(tmp_path / "logits.npz")
    close(got["once"], expected(name))
    np.testing.assert_array_equal(got["once"], got["twice"])
    exact = expected(name)
    assert 0 < np.sqrt(np.mean((got["half"] - exact) ** 2) / np.mean(exact**2)) < 0.05
