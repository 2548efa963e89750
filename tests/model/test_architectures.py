"""The model is a seam: another kind of model trains, evaluates, is saved, goes on, writes and is timed, and nothing in
the package knows of it. It is a bigram model: what comes next depends on the last token alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from bigram import BIGRAM, Bigram, BigramConfig
from runs import RUN, assert_equal_states, at

from nash_mhc.bench.step import bench_step
from nash_mhc.config.schema import ARCHITECTURES, ConfigError, RunConfig
from nash_mhc.loading.load import load
from nash_mhc.model import architectures
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.sampling import Sampling, generate_tokens
from nash_mhc.train.inputs import resolve


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(architectures, "_KNOWN", dict(architectures._KNOWN))
    monkeypatch.setitem(ARCHITECTURES, "bigram", BigramConfig)
    architectures.register(BigramConfig, BIGRAM)


def config(**mesh):
    # A table learns at 640 / 32 times the rate.
    run = dataclasses.replace(RUN, model=BigramConfig(), optim=dataclasses.replace(RUN.optim, learning_rate=3e-3))
    return small.mesh_config(run, **mesh)


def test_it_is_a_model():
    model = Bigram.init(BigramConfig(), key=jax.random.key(0))
    assert isinstance(model, LanguageModel)
    assert count_parameters(BigramConfig()) == 2 * 384 * 32
    assert RunConfig.from_dict(json.loads(json.dumps(config().to_dict()))) == config()


def test_it_trains_on_eight_devices_as_on_one_and_goes_on_bit_for_bit(tmp_path):
    mesh = {"data": 2, "fsdp": 2, "tp": 2}
    alone, unbroken = at(tmp_path / "alone", config()), at(tmp_path / "unbroken", config(**mesh))
    assert alone.evaluation["eval/loss"] == pytest.approx(unbroken.evaluation["eval/loss"], rel=1e-5)
    rows = [json.loads(line) for line in (unbroken.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] < 1.05 * np.log(257)
    assert rows[-1]["health/rms"] > 0
    at(tmp_path / "run", config(**mesh), total_steps=4)
    assert_equal_states(at(tmp_path / "run", config(**mesh)).state, unbroken.state)


def test_it_writes_as_its_whole_pass_would(tmp_path):
    folder = at(tmp_path / "run", config()).folder
    loaded = load(folder)
    options = {"seq_len": 32, "end": loaded.tokenizer.end, "max_tokens": 20, "how": Sampling(0.0)}
    tokens = list(generate_tokens(loaded.model, [loaded.tokenizer.end], **options))
    assert tokens
    x_BTD, _ = loaded.model.hidden(jnp.asarray([[loaded.tokenizer.end, *tokens[:-1]]]))
    best = jnp.argmax((x_BTD @ loaded.model.unembed_VD.T)[0, :, :257], axis=-1)
    assert best.tolist() == tokens


def test_it_is_timed():
    figures = bench_step(config(data=2), steps=2, warmup=1)
    assert figures["parameters"] == 2 * 384 * 32
    assert figures["finite"]
    assert figures["tflops_per_s"] > 0


def test_what_does_not_divide_is_told_by_its_own_names():
    odd = dataclasses.replace(config(fsdp=8), model=BigramConfig(width=36))
    with pytest.raises(ConfigError, match=r"--model-width 36 cannot be split over fsdp = 8; try --mesh-"):
        resolve(odd)


def test_a_run_of_a_model_that_is_not_known_is_refused(tmp_path, monkeypatch):
    folder = at(tmp_path / "run", config(), total_steps=1).folder
    monkeypatch.delitem(ARCHITECTURES, "bigram")
    with pytest.raises(ConfigError, match=r"model_kind bigram: .*nash-mhc"):
        load(folder)
