"""The compiled step: its collectives, and that it has no [B, T, V] float32 array."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import pytest
import small

from nash_mhc.bench.step import count_collectives, without_local_collectives
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.train.device_batches import abstract_batch
from nash_mhc.train.state import sharded_abstract_state
from nash_mhc.train.step import make_objective

STORED = Path(__file__).parent / "expected_collectives.json"


def compiled(cfg):
    mesh, step = small._compiled(cfg)
    return step.compile(sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh))


def compiled_gradients(cfg):
    """Compile the step without its optimizer."""
    mesh, objective = make_mesh(cfg.mesh), make_objective(cfg)
    state = sharded_abstract_state(cfg, mesh)
    out = jax.tree.map(lambda a: a.sharding, state.model), named_sharding(mesh)
    run = jax.jit(
        jax.grad(lambda model, batch: objective(model, jax.tree.map(lambda a: a[0], batch)), has_aux=True), out_shardings=out
    )
    with jax.set_mesh(mesh):
        return run.lower(state.model, abstract_batch(cfg.data, 1, mesh)).compile()


AGREED = [("dense", (2, 2, 2)), ("nash", (2, 2, 2)), ("nash", (1, 1, 8))]  # the first has every axis
AGREED += [pytest.param("dense", shape, marks=pytest.mark.long) for shape in [(8, 1, 1), (1, 8, 1), (1, 1, 8)]]


@pytest.mark.parametrize(("model", "shape"), AGREED, ids=str)
def test_collectives_are_the_ones_that_were_agreed_on(model, shape):
    """A lost sharding shows as a missing or extra collective. After an intended change, update the counts."""
    config = {"dense": small.config, "nash": small.nash_config}[model]
    counts = count_collectives(compiled(small.mesh_config(config(), *shape)))
    expected = json.loads(STORED.read_text())
    version = ".".join(jax.__version__.split(".")[:2])
    assert version in expected, f"no counts for jax {version}: measure them with it, and write them down"
    assert counts == expected[version][model]["x".join(map(str, shape))]
    # In every version: fsdp gathers parameters and reduces gradients; nothing is shuffled between devices.
    assert counts.get("all-to-all", 0) == 0
    if shape[1] * shape[2] > 1:
        assert counts["all-gather"] > 0
    assert counts.get("all-reduce", 0) + counts.get("reduce-scatter", 0) > 0


@pytest.mark.parametrize("remat", ["none", *(pytest.param(name, marks=pytest.mark.long) for name in ("dots", "full"))])
def test_no_remat_policy_keeps_gathered_weights(remat):
    """Each of a layer's seven matrices is gathered in the forward loop and again in the backward loop."""
    counts = count_collectives(compiled_gradients(small.mesh_config(small.config(train__remat=remat), 1, 8, 1)))
    assert counts["all-gather"] >= 2 * 7


@pytest.mark.parametrize("config", [small.config, small.nash_config])
def test_one_device_needs_no_collective(config):
    assert count_collectives(compiled(config())) == {}


# --- the whole architecture on a mesh --------------------------------------------------------------------------------


def collectives(text):
    """(kind, [(name, elements of one device), ...]) of each; combined instructions are split."""
    pattern = r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*op_name=\"([^\"]*)\""
    found = []
    for shapes, kind, name in re.findall(pattern, without_local_collectives(text)):
        sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\w\[([\d,]*)\]", shapes)]
        prefix, several = re.fullmatch(r"(.*?)(?:\(([^()]*:.*)\))?", name).groups()
        names = [prefix + n for n in several.split(":")] if several else [name] * len(sizes)
        found.append((kind, list(zip(names, sizes, strict=True))))
    return found


def inside(name):
    return {"pooling", "nash"} & set(name.split("/"))


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)], ids=str)
def test_pooling_and_the_game_stay_on_their_device(shape):
    """tp splits heads, data and fsdp split sequences, so their computation needs no communication.

    Only gradients of their parameters are added up, over the rows of other devices; along tp not even these, for each
    device has the parameters of its own heads.
    """
    cfg = small.mesh_config(small.nash_config(), *shape)
    text = compiled(cfg).as_text()
    assert "/pooling/" in text and "/nash/" in text  # the named scopes exist
    heads, strides = cfg.model.heads // shape[2], cfg.model.strides
    of_parameters = {
        "pooling": (len(strides) - 1) * 2 * cfg.model.ratio * heads * cfg.model.head_dim,
        "nash": (len(strides) - 1) * heads,
    }
    rows = cfg.data.batch_size // (shape[0] * shape[1])
    # Sizes tell gradients of parameters from what there is for every token:
    # the smallest of that is a number a token and head.
    assert of_parameters["nash"] < rows * cfg.data.seq_len * heads
    assert of_parameters["pooling"] < rows * cfg.data.seq_len // strides[-1] * heads * cfg.model.head_dim
    members = [(kind, name, size) for kind, each in collectives(text) for name, size in each if inside(name)]
    assert bool(members) == (shape[0] * shape[1] > 1), members
    for kind, name, size in members:
        assert kind in ("all-reduce", "reduce-scatter"), (kind, name)
        assert size <= of_parameters[inside(name).pop()], (name, size)


def test_streams_are_split_along_time_between_the_layers():
    """tp devices share the R-fold residual state: the scan over layers carries and saves 1/8 of T."""
    cfg = small.mesh_config(small.nash_config(), 1, 1, 8)
    B, T, D, R = cfg.data.batch_size, cfg.data.seq_len, cfg.model.width, cfg.model.streams
    pattern = r'= (.*) while\(.*op_name="jit\(traced\)/((?:transpose\()?jvp\(\)\)?)/while"'
    loops = {name: shapes_of(types, "f32") for types, name in re.findall(pattern, compiled(cfg).as_text())}
    assert set(loops) == {"jvp()", "transpose(jvp())"}  # the forward and backward loops over layers
    for carried in loops.values():
        assert carried.count((B, T // 8, D)) == R
        # Only the inputs of convolution, attention and feed-forward layer are saved with all of T.
        assert [dims for dims in carried if math.prod(dims) >= B * T * D] in ([], [(cfg.model.layers, B, T, D)] * 3)


def shapes_of(text, dtype):
    return [tuple(map(int, dims.split(","))) for dims in re.findall(rf"\b{dtype}\[([\d,]+)\]", text)]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 8)], ids=str)
def test_no_float32_array_is_as_large_as_all_logits(shape):
    cfg = small.mesh_config(small.config(model__vocab_size=4096, data__seq_len=64), *shape)
    local_logits = cfg.data.batch_size * cfg.data.seq_len * cfg.model.vocab_size // shape[2]
    sizes = [math.prod(dims) for dims in shapes_of(compiled_gradients(cfg).as_text(), "f32")]
    # The check can see such arrays: the largest one is a chunk of the loss, or a parameter.
    assert max(sizes) >= cfg.model.vocab_size * cfg.model.width // shape[2]
    assert max(sizes) < local_logits


@pytest.mark.parametrize("shape", [pytest.param((1, 1, 1), marks=pytest.mark.long), (2, 2, 2)], ids=str)
def test_the_whole_step_can_be_made_for_a_tpu(shape):
    """Lower the step for one and eight TPU chips, with the TPU attention kernel forward and backward."""
    cfg = small.mesh_config(
        small.nash_config(data__seq_len=512, train__attention="splash", train__dtype="bfloat16"), *shape
    )  # 512 tokens are 128 of the coarser scale, the fewest that the kernel takes
    if shape == (1, 1, 1):  # the rest is the same on one chip as on each of eight
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, residual="plain", conv_taps=0))
    mesh, step = small._compiled(cfg)
    shapes = sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh)
    with jax.set_mesh(mesh):
        text = step._jit.trace(*shapes, *step._constants).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 2 * 3  # both scales, one forward and two backward kernels
