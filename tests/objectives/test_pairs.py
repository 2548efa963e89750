"""An objective on pairs of sequences, chosen and rejected, with two config keys: proof (c) of the structure.

Everything is in a kit outside of the package; no file of the package changes.
"""

import json

import pytest
from outside_kit import outside_kit
from runs import rows

from nash_mhc.config import parsing
from nash_mhc.evaluate.scoring import held_out
from nash_mhc.loading.load import load
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train import run
from nash_mhc.train.inferred_settings import infer_settings

INIT = """
from nash_mhc.config.kits import Figure, Kit

KIT = Kit(
    sections={"pairs": "settings:PairsConfig"},
    objectives={"pairs": "pairs:PAIRS"},
    sources={"pairs": "pairs:SOURCE"},
    figures={"preferred": Figure("chosen preferred", "{:.1%}", line=", preferred {eval/preferred:.1%}", of_text=False)},
)
"""

SETTINGS = """
from dataclasses import dataclass

from nash_mhc.config.fields import Section, key


@dataclass(frozen=True)
class PairsConfig(Section):
    section, prefixed, about, of_objective = "pairs", True, "preference pairs (--objective pairs)", "pairs"
    beta: float = key(2.0, "scale of the difference of the mean log-probabilities", above=0)
    margin: float = key(0.5, "difference to reach, times beta", low=0)
"""

PAIRS = '''
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.data.pack import RowSource
from nash_mhc.data.sources import DataSource
from nash_mhc.model.parts import logits_of
from nash_mhc.objectives.base import Aux, Sum
from nash_mhc.objectives.registry import ObjectiveKind

from .settings import PairsConfig


class Pairs(NamedTuple):
    """The fields of `Rows` for the chosen sequence, then those of the rejected one."""

    inputs: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    rejected_inputs: np.ndarray
    rejected_targets: np.ndarray


class CountingPairs(RowSource):
    """The chosen sequence counts up, the rejected one is random."""

    endless, most_documents, examples = True, 1, "pairs"
    name, identity = "pairs", "pairs-1"

    def __init__(self, seed, seq_len):
        self.seed, self.seq_len = seed, seq_len
        self.extras = {name: ("int32", (seq_len,)) for name in Pairs._fields[4:]}

    def take(self, indices):
        starts = np.asarray(indices)[:, None] % 16
        chosen = (starts + np.arange(self.seq_len + 1)).astype(np.int32) % 16
        rejected = np.random.default_rng([self.seed, int(indices[0])]).integers(0, 16, chosen.shape, np.int32)
        ones = np.ones_like(chosen[:, 1:])
        return Pairs(chosen[:, :-1], chosen[:, 1:], ones, ones.astype(np.float32), rejected[:, :-1], rejected[:, 1:])


SOURCE = DataSource(
    takes=lambda dataset, form: dataset == "pairs", open=lambda opening: CountingPairs(opening.seed, opening.cfg.seq_len)
)


def make_pairs(cfg, execution):
    d = cfg.section(PairsConfig)

    def log_prob(model, inputs, targets, batch):
        x_BTD, report = model.hidden(inputs, batch.segments, execution)
        logp_BTV = jax.nn.log_softmax(logits_of(x_BTD, model.unembed_VD, model.cfg.vocab_size))
        logp_BT = jnp.take_along_axis(logp_BTV, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(batch.weights * logp_BT, axis=1) / jnp.maximum(batch.weights.sum(axis=1), 1.0), report

    def pairs(model, batch):
        chosen_B, report = log_prob(model, batch.inputs, batch.targets, batch)
        rejected_B, _ = log_prob(model, batch.extras["rejected_inputs"], batch.extras["rejected_targets"], batch)
        counts_B = (batch.weights.sum(axis=1) > 0).astype(jnp.float32)  # an evaluation may end with rows of no weight
        loss = jnp.sum(-counts_B * jax.nn.log_sigmoid(d.beta * (chosen_B - rejected_B) - d.margin))
        sums = {"loss": loss, "preferred": jnp.sum(counts_B * (chosen_B > rejected_B))}
        return loss, Aux({name: Sum(total, counts_B.sum()) for name, total in sums.items()}, model.health(report))

    return pairs


PAIRS = ObjectiveKind(make_pairs, examples="pairs")
'''

FLAGS = (
    "--objective pairs --pairs-beta 4 --mesh-data 2 --mesh-fsdp 2 --mesh-tp 2 --batch-size 8 --seq-len 32 "
    "--model-width 32 --model-layers 1 --model-heads 8 --model-kv-heads 8 --model-head-dim 4 --model-ffn 64 "
    "--model-scales 1 --model-window none --model-conv-taps 0 --model-residual plain --learning-rate 1e-2 --warmup-steps 1 "
    "--total-steps 20 --eval-interval 10 --eval-batches 2 --log-interval 10 --sample-tokens 0"
).split()


@pytest.fixture
def kit(tmp_path, monkeypatch):
    with outside_kit(
        tmp_path / "preference", {"__init__.py": INIT, "settings.py": SETTINGS, "pairs.py": PAIRS}, monkeypatch
    ) as folder:
        yield folder


def test_an_objective_on_pairs_trains_on_eight_devices_and_is_evaluated(kit, tmp_path):
    out = tmp_path / "run"
    argv = ["--kit", str(kit), *FLAGS, "--dataset", "pairs", "--checkpoint-dir", str(out)]
    cfg = parsing.parse(argv, found=infer_settings).config
    result = run(cfg, quiet=True)
    recorded = json.loads((out / "run.json").read_text())["config"]
    assert recorded["pairs"] == {"beta": 4.0, "margin": 0.5}
    first, last = rows(out, "eval.jsonl")[0], rows(out, "eval.jsonl")[-1]
    assert last["eval/loss"] < 0.5 * first["eval/loss"] and last["eval/preferred"] > 0.9
    assert rows(out)[-1]["preferred"] > 0.9
    # Resume with another margin: a setting of the program, known by its flag and by the run.
    more = parsing.parse([*argv, "--total-steps", "22", "--pairs-margin", "3"], found=infer_settings).config
    assert run(more, quiet=True).evaluation["eval/loss"] > result.evaluation["eval/loss"]
    # The evaluation command rebuilds the objective from the run.
    mesh = make_mesh(cfg.mesh)
    found = held_out(load(str(out), None, mesh=mesh), mesh, batch_size=8)
    assert found["loss"] == pytest.approx(rows(out, "eval.jsonl")[-1]["eval/loss"], rel=1e-3)


def test_pairs_need_their_own_data(kit, tmp_path):
    argv = ["--kit", str(kit), *FLAGS, "--dataset", "stories", "--checkpoint-dir", str(tmp_path / "run")]
    with pytest.raises(parsing.ConfigError, match=r"--objective pairs .*--dataset stories"):
        run(parsing.parse(argv, found=infer_settings).config, quiet=True)
