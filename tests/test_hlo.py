"""What the compiled step says of itself: its collectives, and that no [B, T, V] float32 array exists in it."""

import json
import math
import re
from pathlib import Path

import jax
import pytest
import small

from nash_mhc.bench.aot import count_collectives
from nash_mhc.train.feed import abstract_batch
from nash_mhc.train.state import sharded_abstract_state

STORED = Path(__file__).parent / "expected_collectives.json"


def compiled(cfg):
    mesh, step = small._compiled(cfg)
    return step.compile(sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh))


@pytest.mark.parametrize("shape", [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)], ids=str)
def test_collectives_are_the_ones_that_were_agreed_on(shape):
    """A lost sharding shows as a missing or an extra collective. After a wanted change, write the new counts down."""
    counts = count_collectives(compiled(small.mesh_config(small.config(), *shape)))
    expected = json.loads(STORED.read_text())
    version = ".".join(jax.__version__.split(".")[:2])
    name = "x".join(map(str, shape))
    if version in expected:
        assert counts == expected[version][name]
    # Of any version: parameters are gathered over fsdp, gradients come back, nothing is shuffled between devices.
    assert counts.get("all-to-all", 0) == 0
    if shape[1] * shape[2] > 1:
        assert counts["all-gather"] > 0
    assert counts.get("all-reduce", 0) + counts.get("reduce-scatter", 0) > 0


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_no_remat_policy_keeps_gathered_weights(remat):
    """Each of a layer's seven matrices is gathered in the forward loop and again in the backward loop, not kept between."""
    counts = count_collectives(compiled(small.mesh_config(small.config(train__remat=remat), 1, 8, 1)))
    assert counts["all-gather"] >= 2 * 7


def test_one_device_needs_no_collective():
    assert count_collectives(compiled(small.config())) == {}


def shapes_of(text, dtype):
    return [tuple(map(int, dims.split(","))) for dims in re.findall(rf"\b{dtype}\[([\d,]+)\]", text)]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 8)], ids=str)
def test_no_float32_array_is_as_large_as_all_logits(shape):
    cfg = small.mesh_config(small.config(model__vocab_size=4096, data__seq_len=64), *shape)
    local_logits = cfg.data.batch_size * cfg.data.seq_len * cfg.model.vocab_size // shape[2]
    sizes = [math.prod(dims) for dims in shapes_of(compiled(cfg).as_text(), "f32")]
    # The check can see such an array: the largest that is there is the loss's own chunk, or a parameter.
    assert max(sizes) >= cfg.model.vocab_size * cfg.model.width // shape[2]
    assert max(sizes) < local_logits
