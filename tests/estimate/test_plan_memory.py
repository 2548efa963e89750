"""The memory estimate, compared with the compiler, and its invariants."""

import dataclasses
import math

import jax
import pytest
import small
from runs import described_run, drawn_run
from sampled import long

from nash_mhc.config import presets
from nash_mhc.config.schema import (
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from nash_mhc.data.stories import StoryRows
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.estimate.memory import estimate
from nash_mhc.kits.distill.objective import Teachers
from nash_mhc.kits.distill.settings import DistillConfig
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.model.architectures import architecture_of
from nash_mhc.model.protocol import Execution
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.device_batches import abstract_batch
from nash_mhc.train.state import sharded_abstract_state

# Many layers (a loop compiles them as fast as few), so that per-layer memory has a realistic share.
_SIZES = {"vocab_size": 1000, "width": 128, "layers": 16, "heads": 8, "kv_heads": 8, "head_dim": 16, "ffn": 384}
MODELS = {
    "dense": ModelConfig(**_SIZES, scales=1, conv_taps=0, residual="plain"),
    "nash": ModelConfig(**_SIZES, scales=2, ratio=4, window=32, conv_taps=2, residual="mhc", streams=2, nash_iterations=1),
}
MODELS["once"] = dataclasses.replace(MODELS["nash"], residual="mhc-layer")
MODELS["nash"] = dataclasses.replace(MODELS["nash"], window=None)
_SIZES = {"vocab_size": 1000, "width": 128, "ffn": 320}
_PUZZLE = {"causal": False, "mixer": "cells", "cells": 32, "inner_cycles": 1, "most_passes": 4}
MODELS |= {
    "reservoir": ReservoirConfig(**_SIZES, layers=12, units=384),
    "attending": ReservoirConfig(**_SIZES, layers=12, units=384, attention_every=2),
    "tanh": ReservoirConfig(**_SIZES, layers=12, units=256, unit="tanh", ring=16),
    "recursive": RecursiveConfig(**_SIZES, layers=1, inner_cycles=1, gradient_cycles=2),
    "puzzle": RecursiveConfig(**_SIZES | {"vocab_size": 12}, layers=2, **_PUZZLE),
}
MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]


def run(model: str, mesh: tuple[int, int, int], remat: str, **data: int) -> RunConfig:
    remat, _, keep = remat.partition("+")
    return RunConfig(
        model=MODELS[model],
        data=DataConfig(**{"batch_size": 64, "seq_len": 32} | data),
        mesh=MeshConfig(**dict(zip(("data", "fsdp", "tp"), mesh, strict=True))),
        train=TrainConfig(dtype="float32", attention="xla", unroll="no", remat=remat, remat_keep=keep or None),
        objective=ObjectiveConfig(name="puzzle") if model == "puzzle" else ObjectiveConfig(),
    )


# Of Nash-MHC, which compiles three times as long, the mesh whose devices share the streams along time; `make test-long`
# adds the mesh with all axes split. The other model kinds: each unit and mixer once, with every remat.
COMPILED = [("dense", (2, 2, 2), "dots+ffn-up")]
COMPILED += [("once", (1, 1, 8), "full+read,mixed,coefficients")]
COMPILED += [("puzzle", (2, 2, 2), "full")]
_LONG = [("tanh", (8, 1, 1), "none"), ("dense", (1, 1, 8), "dots"), ("nash", (2, 2, 2), "dots")]
_LONG += [("dense", (1, 8, 1), "full"), ("attending", (2, 2, 2), "dots"), ("recursive", (1, 8, 1), "none")]
COMPILED += [pytest.param(*case, marks=pytest.mark.long) for case in _LONG]


def size_of(found):
    """Return the peak bytes of a compiled program."""
    return (
        found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    )  # fmt: skip


@pytest.mark.parametrize(("model", "mesh", "remat"), COMPILED, ids=str)
def test_the_estimate_is_within_15_percent_of_the_compiler(model, mesh, remat):
    cfg = run(model, mesh, remat)
    devices, step = small._compiled(cfg)
    batch = abstract_batch(cfg.data, cfg.train.grad_accum, devices)
    found = step.compile(sharded_abstract_state(cfg, devices), batch).memory_analysis()
    assert estimate(cfg, cfg.mesh.axes).total == pytest.approx(size_of(found), rel=0.15)


@pytest.mark.parametrize("mesh", [*MESHES, (1, 1, 1), (4, 2, 1)], ids=str)
def test_parameters_and_moments_are_those_of_the_sharded_state(mesh):
    cfg = run("nash", mesh, "dots")
    state = sharded_abstract_state(cfg, make_mesh(cfg.mesh))
    own = lambda tree: sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )  # fmt: skip
    found = estimate(cfg, cfg.mesh.axes)
    assert (found.parameters, found.optimizer) == (own(state.model), own(state.opt_state))


@pytest.mark.parametrize("model", ["nash", "reservoir", "tanh", "recursive", "puzzle"])
def test_what_is_computed_again_is_not_held(model):
    mesh, rows = {"data": 2, "fsdp": 2, "tp": 2}, {"batch_size": 1024}  # so many that they dominate
    by_remat = [
        estimate(run(model, (2, 2, 2), remat, **rows), mesh) for remat in ("none", "dots", "full", "full+ffn-up", "dots+ffn-up")
    ]
    *kept, with_up, with_both = [m.streams + m.activations for m in by_remat]
    assert kept == sorted(kept, reverse=True) and kept[0] > 2 * kept[1] > 2 * kept[2]
    assert kept[2] < with_up < with_both < kept[0] and kept[1] < with_both
    assert by_remat[0].streams == by_remat[1].streams  # independent of remat


def test_what_an_objective_carries_is_counted():
    cfg = run("puzzle", (2, 2, 2), "full")
    carry = sharded_abstract_state(cfg, make_mesh(cfg.mesh)).carry
    own = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(carry))
    alone = architecture_of(cfg.model).activations(cfg.model, Execution(), 16, 32, 2).streams
    assert estimate(cfg, cfg.mesh.axes).streams == alone + own


def test_a_recursive_model_holds_what_the_gradient_goes_through_and_nothing_of_the_cycles_before():
    cfg = run("recursive", (1, 1, 1), "dots")
    more = {}
    for name, cycles in (("all", 2), ("half", 1)):
        model = dataclasses.replace(cfg.model, gradient_cycles=cycles)
        more[name] = estimate(dataclasses.replace(cfg, model=model), cfg.mesh.axes)
    assert more["all"].activations == 2 * more["half"].activations > 0
    longer = dataclasses.replace(cfg.model, outer_cycles=5)
    assert estimate(dataclasses.replace(cfg, model=longer), cfg.mesh.axes) == more["all"]


@pytest.mark.parametrize("tp", [2, *long(4), 8])
def test_a_scale_as_coarse_as_tp_is_not_gathered(tp):
    """Its rows are as many as the tokens of a device's share of the sequence."""
    execution = Execution(remat="dots", attention="xla")
    whole, share = (architecture_of(small.NASH).activations(small.NASH, execution, 8, 64, n) for n in (1, tp))
    assert (share.streams, share.saved) == (whole.streams / tp, whole.saved / tp)


def test_averaged_weights_and_parts_of_a_batch_are_counted():
    cfg = run("dense", (1, 1, 1), "dots")
    plain, mesh = estimate(cfg, cfg.mesh.axes), cfg.mesh.axes
    averaged = estimate(dataclasses.replace(cfg, optim=OptimConfig(ema_decay=0.9)), mesh)
    assert averaged.optimizer == plain.optimizer + plain.parameters
    halves = dataclasses.replace(cfg.train, grad_accum=2)
    in_parts = estimate(dataclasses.replace(cfg, data=DataConfig(batch_size=32, seq_len=32), train=halves), mesh)
    assert in_parts.streams == plain.streams / 2


@pytest.mark.long
def test_teachers_are_counted_as_the_compiler_counts_them(tmp_path):
    """A teacher with layer comparison and an anchor: their weights, outputs for two batches, and the student's step."""
    plain = run("dense", (2, 2, 2), "dots")
    for name in ("teacher", "begun"):
        drawn_run(tmp_path / name, plain)
    cfg = dataclasses.replace(
        plain,
        train=dataclasses.replace(plain.train, init_from=str(tmp_path / "begun")),
        objective=ObjectiveConfig(name="distill"),
        of_kits=(DistillConfig(teacher=str(tmp_path / "teacher"), top_k=16, layers=0.3, anchor=0.5),),
    )
    devices, step = small._compiled(cfg)
    teachers = Teachers(cfg.section(DistillConfig), cfg.model, cfg.data, cfg.train, load_tokenizer("bytes"), devices)
    rows = StoryRows(load_tokenizer("bytes"), seed=0, split="train", seq_len=32)
    bare = abstract_batch(cfg.data, 1, devices)
    batch = teachers.abstract(rows, bare)
    held = size_of(step.compile(sharded_abstract_state(cfg, devices), batch).memory_analysis())
    weights = 0
    for one in teachers._online.values():
        weights += sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(one._loaded.model))
        reading = one.program(rows).compile(one._loaded.model, bare).memory_analysis()
        held += reading.output_size_in_bytes
    found = estimate(cfg, cfg.mesh.axes)
    assert found.teachers == weights > 0
    assert found.total == pytest.approx(held + weights, rel=0.15)
    assert found.total - estimate(cfg.with_next_token(), cfg.mesh.axes).total >= weights


def test_a_teacher_larger_than_its_student_is_counted_while_it_reads(tmp_path):
    """A wide teacher needs more working memory than a step of the student."""
    wide = dataclasses.replace(MODELS["dense"], width=1024, heads=64, kv_heads=64, ffn=16384, layers=1)
    described_run(tmp_path, dataclasses.replace(run("dense", (1, 1, 1), "full"), model=wide))
    student = dataclasses.replace(MODELS["dense"], layers=1)
    cfg = dataclasses.replace(run("dense", (1, 1, 1), "full"), model=student, objective=ObjectiveConfig(name="distill"))
    taught = cfg.with_section(DistillConfig(teacher=str(tmp_path)))
    assert estimate(taught, cfg.mesh.axes).temporaries > estimate(cfg, cfg.mesh.axes).temporaries + 2**20


def test_a_mesh_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"--model-heads 22 .*cannot be split over tp = 4"):
        estimate(presets.run("3b"), {"data": 1, "fsdp": 2, "tp": 4})
