"""Generation from a trained run: greedy and sampled tokens, cuts, reproducibility, one-line errors."""

import contextlib
import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import MeshConfig, ModelConfig, RunConfig
from nash_mhc.data.tokenizer import ByteTokenizer, stream_text
from nash_mhc.generate.__main__ import main
from nash_mhc.loading.load import Loaded, load
from nash_mhc.model.sampling import MANY, Sampling, context_start, generate_tokens, keep_likely, sample
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.samples import Samples
from nash_mhc.train.state import ProgramKey, abstract_state, state_shardings
from nash_mhc.train.trainer import Result

T = 32
BYTES = ByteTokenizer()


def tiny_config(folder: Path) -> RunConfig:
    model = {"width": 16, "layers": 1, "heads": 8, "kv_heads": 8, "head_dim": 2, "ffn": 16}
    model |= {"scales": 2, "ratio": 8, "residual": "plain"}  # compiles fast; test_incremental.py has the other forms
    train = {"total_steps": 2, "eval_batches": 1, "log_interval": 1, "checkpoint_dir": str(folder)}
    values = {
        "model": model,
        "data": {"batch_size": 2, "seq_len": T},
        "train": train | {"checkpoint_interval": 1},
        "mesh": {"platform": "cpu"},
        "optim": {"warmup_steps": 0},
    }
    return RunConfig.from_dict(values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    cfg = tiny_config(tmp_path_factory.mktemp("runs") / "tiny")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        result = runs.at(cfg.train.checkpoint_dir, cfg, evaluated=False)
    assert shown.getvalue() == ""  # a sample belongs to the command
    return result


@pytest.fixture(scope="module")
def folder(trained: Result) -> Path:
    return trained.folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(folder)


@pytest.fixture(scope="module")
def lively(loaded: Loaded) -> Loaded:
    """A model whose output depends on the context, unlike one after two training steps."""
    rng = np.random.default_rng(3)
    noisy = jax.tree.map(lambda a: (a + 0.25 * rng.standard_normal(a.shape)).astype(a.dtype), jax.device_get(loaded.model))
    # To where the other lies: what is compiled for that one serves this one, too.
    return dataclasses.replace(loaded, model=jax.device_put(noisy, jax.tree.leaves(loaded.model)[0].sharding))


def tokens_of(loaded: Loaded, prompt: list[int], **options: object) -> list[int]:
    # An end token of -1 never comes, so that the length of the text is known.
    how = Sampling(**{name: options.pop(name) for name in ("temperature", "top_k") if name in options})  # type: ignore[arg-type]
    return list(generate_tokens(loaded.model, prompt, how, seq_len=T, **({"end": -1} | options)))  # type: ignore[arg-type]


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, argv)])
    code = one_line_errors(main)
    out, err = capsys.readouterr()
    return code, out, err


def compiled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the generation programs among those compiled."""
    said = [record.getMessage() for record in caplog.records]
    return [text for text in said if text.startswith("Compiling") and "decode_chunk" in text.split("with")[0]]


def test_non_finite_weights_generate_nothing(
    folder: Path, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = eqx.tree_at(lambda model: model.norm, loaded.model, replace_fn=lambda n: jax.tree.map(lambda a: a * np.nan, n))
    runs.untrained_run(tmp_path / "run", loaded.config, broken)
    (tmp_path / "prompts.txt").write_text("One\nTwo\n")
    for argv in (["--prompt", "Once"], ["--prompts", tmp_path / "prompts.txt"]):
        code, out, err = command(monkeypatch, capsys, tmp_path / "run", "--max-tokens", 4, *argv)
        assert (code, out) == (2, "")
        assert "not finite" in err.splitlines()[-1] and "Traceback" not in err


def test_greedy_equals_the_argmax_of_the_full_model(loaded: Loaded) -> None:
    prompt = [256, *b"Once"]
    made = tokens_of(loaded, prompt, max_tokens=20, temperature=0.0)
    # Causal: one pass over the finished text gives what each step saw.
    logits_TV = np.asarray(jax.jit(lambda model, tokens_1T: model(tokens_1T)[0])(loaded.model, jnp.array([prompt + made])))
    assert len(made) == 20
    assert made == np.argmax(logits_TV, axis=-1)[len(prompt) - 1 : -1].tolist()


def test_a_full_cache_restarts_with_its_last_half_in_whole_blocks(loaded: Loaded) -> None:
    cfg = loaded.model.cfg
    assert cfg.coarsest_stride == 8
    starts = lambda seq_len, counts: [context_start(cfg, n, seq_len) for n in counts]
    assert starts(32, (1, 32, 33, 48, 49, 64, 65, 400)) == [0, 0, 16, 16, 32, 32, 48, 368]
    assert starts(24, (24, 25, 40, 41)) == [0, 16, 16, 32]  # half is 12 tokens: one block of 8 is kept
    assert starts(8, (8, 9, 12, 13)) == [0, 4, 4, 8]  # no whole block in a half
    assert starts(2, (2, 3, 4)) == [0, 1, 2]


def test_each_token_is_sampled_from_the_documented_context(lively: Loaded) -> None:
    """Compare with full forward passes, across two restarts of the cache."""
    logits = jax.jit(lambda model, tokens_T, count: model(tokens_T[None])[0, count - 1])
    drawn = jax.jit(lambda logits_V, i: sample(logits_V, jax.random.fold_in(jax.random.key(5), i), 1.0))
    prompt = [256, *b"a prompt that alone is longer than the row"]
    for given, count in ((prompt, 30), (prompt[:20], 50)):
        made = tokens_of(lively, given, max_tokens=count, temperature=1.0, seed=5)
        assert len(set(made)) > 20
        text = given + made
        for i, token in enumerate(made):
            seen = text[context_start(lively.model.cfg, len(given) + i, T) : len(given) + i]
            assert T // 2 < len(seen) <= T or len(seen) == len(given) + i
            logits_V = logits(lively.model, np.array(seen + [0] * (T - len(seen)), np.int32), len(seen))
            assert token == int(drawn(logits_V, i)), i


def test_continuing_a_generated_text_gives_the_same_tokens(lively: Loaded) -> None:
    made = tokens_of(lively, [256], max_tokens=60, temperature=0.0)
    assert len(set(made)) > 5
    for cut in (1, 31, 32, 33, 55):
        assert tokens_of(lively, [256, *made[:cut]], max_tokens=60 - cut, temperature=0.0) == made[cut:]


def test_a_long_prompt_reports_progress_and_compiles_once(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, messages: list[str]
) -> None:
    monkeypatch.setattr("nash_mhc.model.sampling._PROGRESS_S", -1.0)
    with jax.log_compiles():
        list(generate_tokens(loaded.model, [65] * 150, seq_len=192, end=-1, max_tokens=60))
    assert messages == [f"reading the prompt: {n} of 150 tokens ..." for n in (64, 128)]
    assert len(compiled(caplog)) == 1  # for chunks of the prompt, single tokens and a fresh start alike


def test_a_run_on_one_device_writes_its_samples_with_one_program(trained: Result, caplog: pytest.LogCaptureFixture) -> None:
    cfg = tiny_config(trained.folder)
    telemetry = dataclasses.replace(cfg.telemetry, sample_tokens=2 * MANY)
    samples = Samples(telemetry, cfg.model, make_mesh(cfg.mesh), BYTES, 24, cfg.train.dtype)
    with jax.log_compiles():
        assert samples.write(trained.state.model)
    assert len(compiled(caplog)) == 1


def test_the_end_token_ends_the_text(loaded: Loaded) -> None:
    free = tokens_of(loaded, [256], max_tokens=10, temperature=1.0, seed=3)
    last = free[6]
    assert tokens_of(loaded, [256], max_tokens=10, temperature=1.0, seed=3, end=last) == free[: free.index(last)]


def test_the_seed_determines_the_text(loaded: Loaded) -> None:
    one, again, other = (tokens_of(loaded, [256], max_tokens=16, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert one == again
    assert one != other


def test_top_k_one_is_greedy(loaded: Loaded) -> None:
    greedy = tokens_of(loaded, [256], max_tokens=12, temperature=0.0)
    assert tokens_of(loaded, [256], max_tokens=12, temperature=5.0, top_k=1, seed=9) == greedy
    tie = jnp.array([0.0, 2.0, 2.0, 1.0])
    draws = {int(sample(tie, jax.random.key(i), 1.0, 1, 1.0)) for i in range(8)}
    assert draws == {int(sample(tie, jax.random.key(0), 0.0))} == {1}


def test_an_empty_prompt_is_an_error(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        tokens_of(loaded, [])


likely = jax.jit(keep_likely, static_argnums=(1, 2))


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.75, 0.999])
def test_top_p_keeps_the_fewest_tokens_with_that_probability(top_p: float) -> None:
    logits_V = (2.0 * np.random.default_rng(5).normal(size=50)).astype(np.float32)
    mass_V = np.exp(logits_V, dtype=np.float64) / np.exp(logits_V, dtype=np.float64).sum()
    kept = np.isfinite(np.asarray(likely(logits_V, 0, top_p)))
    assert mass_V[kept].sum() >= top_p - 1e-6
    assert mass_V[kept].sum() - mass_V[kept].min() < top_p
    assert not kept.all()
    assert mass_V[kept].min() >= mass_V[~kept].max()


def test_top_k_and_top_p_combine() -> None:
    logits_V = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    assert np.allclose(likely(logits_V, 0, 1.0), logits_V)
    assert np.isfinite(likely(logits_V, 3, 1.0)).tolist() == [False, True, True, True]
    # Of the two best, 4/7 and 3/7: the first alone has the mass.
    assert np.isfinite(likely(logits_V, 2, 0.55)).tolist() == [False, True, False, False]


def test_temperature_sharpens() -> None:
    logits_V, keys = np.array([0.0, 1.0], np.float32), jax.random.split(jax.random.key(0), 200)
    drawn = jax.jit(jax.vmap(sample, in_axes=(None, 0, None)), static_argnums=2)
    share = {t: float(np.mean(drawn(logits_V, keys, t))) for t in (1e-30, 1.0, 100.0)}
    assert share[1e-30] == 1.0
    assert 0.62 < share[1.0] < 0.84  # 0.731 expected, deviation 0.031
    assert 0.38 < share[100.0] < 0.62


@pytest.mark.parametrize("data", ["plain €uro 😀!".encode(), b"ab\xe2\x82", b"\xff\x80\x80\x80\x80\xe2(\xf0\x9f\x98\x80x"])
def test_streaming_never_splits_a_character(data: bytes) -> None:
    pieces = list(stream_text(iter(data), BYTES))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    assert all(pieces)
    if b"\xf0\x9f\x98\x80" in data:
        assert any("😀" in piece for piece in pieces)


def test_streaming_yields_text_immediately() -> None:
    seen: list[int] = []
    source = (seen.append(b) or b for b in b"abc")
    stream = stream_text(source, BYTES)
    assert next(stream) == "a"
    assert seen == [ord("a")]


def test_averaged_weights_of_any_mesh_load_on_one_device(tmp_path: Path, folder: Path) -> None:
    values = json.loads((folder / "run.json").read_text())["config"]
    values["optim"]["ema_decay"] = 0.9
    cfg = RunConfig.from_dict(values)
    mesh = jax.make_mesh((2, 2, 2), tuple(MeshConfig().axes), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    shape = abstract_state(cfg)
    values_of = jax.tree.map(lambda a: np.arange(a.size, dtype=a.dtype).reshape(a.shape), shape)
    values_of = eqx.tree_at(lambda s: s.ema, values_of, jax.tree.map(np.negative, values_of.model))
    state = jax.tree.map(jax.device_put, values_of, state_shardings(ProgramKey.of(cfg), mesh))
    assert len(state.ema.embed_VD.devices()) == 8
    with Store(tmp_path) as store:
        store.save(7, state, {})
    (tmp_path / "run.json").write_text(json.dumps({"config": values}))
    loaded = load(tmp_path)
    assert loaded.step == 7
    assert loaded.model.embed_VD.devices() == {jax.devices()[0]}
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.model, values_of.ema))
    assert not np.array_equal(loaded.model.embed_VD, values_of.model.embed_VD)


def test_command_prints_the_prompt_and_its_continuation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--checkpoint-dir", folder, "--prompt", "Once", "--max-tokens", 12, "--seed", 4, "--step", 1)
    code, text, err = command(monkeypatch, capsys, *argv)
    assert (code, err) == (0, f"reading step 1 of {folder} ...\ncompiling ...\n")
    first = load(folder, 1)
    made = generate_tokens(first.model, [256, *b"Once"], seq_len=T, end=256, max_tokens=12, seed=4)
    assert text == "Once" + BYTES.decode(np.array(list(made))) + "\n"
    code, text, _ = command(monkeypatch, capsys, "--checkpoint-dir", folder, "--prompt", "", "--max-tokens", 3)
    assert code == 0
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temprature", "1"], "unknown flag --temprature; did you mean --temperature?"),
        (["--zzz=1"], "unknown flag --zzz; --help lists them all"),
        (["hello"], "give one folder, not both hello and DIR"),
        (["hello", "there"], "unexpected argument 'there'; give the prompt with --prompt 'there'"),
        (["--top-k", "many"], "--top-k: invalid int value: 'many'"),
        (["--top-k"], "--top-k: expected one argument"),
        (["--top-k", "-1"], "--top-k must be at least 0, not -1"),
        (["--top-p", "0"], "--top-p must be above 0, not 0.0"),
        (["--top-p", "1.5"], "--top-p must be at most 1, not 1.5"),
        (["--temperature", "-0.1"], "--temperature must be at least 0, not -0.1"),
        (["--temperature", "nan"], "--temperature must be a finite number, not nan"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8 text"),
        (["--step", "7"], "--step 7: DIR has no such checkpoint; its checkpoints: 1, 2"),
    ],
)
def test_each_bad_flag_is_one_line(
    argv: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(monkeypatch, capsys, "--checkpoint-dir", folder, *argv)
    assert (code, out) == (2, "")
    assert err == f"error: {message.replace('DIR', str(folder))}\n"


def test_each_unusable_folder_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*argv: object) -> str:
        code, out, err = command(monkeypatch, capsys, *argv)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix("error: ").replace(str(tmp_path), "DIR").strip()

    assert "python -m nash_mhc.generate runs/" in error()
    nowhere = error(tmp_path / "no")
    assert nowhere.startswith("DIR/no: no such folder; ") and nowhere.endswith("--prompt")
    assert error("--checkpoint-dir", tmp_path / "no") == nowhere
    at = (tmp_path,)
    assert error(*at).startswith("DIR: contains neither a run nor a model; ")
    (tmp_path / "run.json").write_text("{")
    assert error(*at).startswith("DIR/run.json: cannot be read (")
    (tmp_path / "run.json").write_text("[]")
    assert error(*at).startswith("DIR/run.json: cannot be read (")
    (tmp_path / "run.json").write_text('{"config": {"model": {"colour": 3}}}')
    assert error(*at).startswith("DIR/run.json: unknown key model.colour; choose from ")
    shutil.copy(folder / "run.json", tmp_path)
    assert error(*at).startswith("DIR has no checkpoint; the run saves one every --checkpoint-interval")
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints").mkdir()
    assert error(*at).startswith("DIR/checkpoints has no complete checkpoint")


def test_the_model_is_the_one_described(loaded: Loaded, folder: Path) -> None:
    assert loaded.step == 2
    first = load(folder, 1)
    assert first.step == 1
    assert not np.array_equal(first.model.embed_VD, loaded.model.embed_VD)
    assert loaded.model.cfg == loaded.config.model == ModelConfig(257, 16, 1, 8, 8, 2, 16, 2, 8, residual="plain")
