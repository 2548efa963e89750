"""Documents that begin anywhere in a row:
spread out to whole blocks and back, they have the logits that they have alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from corpora import BYTES, prepared, save_tokenizer

from nash_mhc.config.schema import DataConfig
from nash_mhc.data.pack import Piece, aligned_length, pack_pieces, unpack
from nash_mhc.data.prepared.folder import PreparedRows
from nash_mhc.data.sources import open_source
from nash_mhc.data.stories import StoryRows
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.model import LM
from nash_mhc.model.protocol import Execution
from nash_mhc.ops.spread import gather, plan_spread, spread
from nash_mhc.parallel.sharding import shardings
from nash_mhc.train.step import make_objective, padded_attention_length

STRIDE = small.NASH.coarsest_stride  # 4
T, ROOM = 48, 64


def rows_of(lengths, seed=0):
    """One row of documents of these lengths, one right after the other, and padding."""
    rng = np.random.default_rng(seed)
    pieces = [Piece(rng.integers(0, 257, n + 1).astype(np.int32), np.ones(n, bool)) for n in lengths]
    laid, _ = pack_pieces(pieces, 256, T, align=1)
    assert len(laid.used) == 1
    return laid, unpack(laid, 256)


def positions(segments):
    """Slots since the start of the document, for each slot."""
    slots = np.arange(segments.shape[-1])
    begins = np.diff(segments, axis=-1, prepend=-1) != 0
    return slots - np.maximum.accumulate(np.where(begins, slots, 0), axis=-1)


planned, gathered = jax.jit(plan_spread, static_argnums=(1, 2)), jax.jit(gather)
LENGTHS = ([7, 13, 5, 9], [1, 1, 1, 2, 3], [48], [4, 8, 12], [47], [3, 30, 6, 2, 1])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_document_begins_at_a_multiple_and_all_of_it_comes_back(lengths):
    laid, row = rows_of(lengths)
    x = np.random.default_rng(0).normal(size=(1, T, 3, 2)).astype(np.float32)
    assert T <= aligned_length(laid, STRIDE) <= ROOM
    for room in (-(-aligned_length(laid, STRIDE) // STRIDE) * STRIDE, ROOM):
        by, segments_BU = planned(row.segments, STRIDE, room)
        blocks = np.asarray(segments_BU).reshape(-1, STRIDE)
        assert (blocks == blocks[:, :1]).all()  # no block holds two documents
        out = np.asarray(jax.jit(spread)(x, by))
        np.testing.assert_array_equal(gathered(out, by), x)
        assert np.abs(out).sum() == pytest.approx(np.abs(x).sum(), rel=1e-6)  # and nothing twice
        np.testing.assert_array_equal(gathered(segments_BU, by), row.segments)
        np.testing.assert_array_equal(gathered(positions(np.asarray(segments_BU)), by), positions(row.segments))


def test_gradients_are_those_of_the_lookups():
    _, row = rows_of([7, 13, 5, 9])
    by, _ = planned(row.segments, STRIDE, ROOM)
    rng = np.random.default_rng(0)
    for move, n, out in ((spread, T, ROOM), (gather, ROOM, T)):
        x, seed = (rng.normal(size=(1, size, 5)).astype(np.float32) for size in (n, out))
        pulled = lambda move, x=x, seed=seed: jax.jit(lambda x, seed: jax.vjp(lambda x: move(x, by), x)[1](seed)[0])(x, seed)
        np.testing.assert_allclose(pulled(move), pulled(move.__wrapped__), atol=1e-6)


# Streams do not care where documents begin, and compile for long, as do many windows a row.
PLAIN = dataclasses.replace(small.NASH, residual="plain", window=16)


logits = jax.jit(LM.__call__, static_argnums=3)  # of one row, with room for documents that begin anywhere or without


@pytest.fixture(scope="module")
def model():
    return jax.tree.map(jnp.asarray, small.generic_model(PLAIN))


def test_packed_anywhere_is_alone(model):
    whole = jnp.ones((1, T), jnp.int32)
    for lengths in LENGTHS:
        _, row = rows_of(lengths)
        packed = np.asarray(logits(model, jnp.asarray(row.inputs), jnp.asarray(row.segments), Execution(padded_length=ROOM)))
        for segment in range(1, int(row.segments.max()) + 1):
            slots = np.flatnonzero(row.segments[0] == segment)
            padded = np.zeros((1, T), np.int32)
            padded[0, : len(slots)] = row.inputs[0, slots]
            alone = np.asarray(logits(model, jnp.asarray(padded), whole, Execution()))
            want = alone[0, : len(slots)]  # what comes after has no say: it is causal
            np.testing.assert_allclose(packed[0, slots], want, atol=3e-5, err_msg=f"{lengths}, {segment}")


def test_aligned_rows_are_the_same_either_way(model):
    rows = small.random_rows(dataclasses.replace(small.nash_config(data__seq_len=T), model=PLAIN), 3)
    for inputs_T, segments_T in zip(rows.inputs[0], rows.segments[0], strict=True):
        args, real = (jnp.asarray(inputs_T[None]), jnp.asarray(segments_T[None])), segments_T > 0
        spread_out, as_they_are = (
            np.asarray(logits(model, *args, how)) for how in (Execution(padded_length=ROOM), Execution())
        )
        np.testing.assert_allclose(spread_out[0, real], as_they_are[0, real], atol=3e-5)


@pytest.mark.long
def test_loss_and_gradients_of_such_rows_are_the_same_on_every_mesh(monkeypatch):
    # Two scales with the blocks of three, which answer each other once, and two windows a row: less of the same.
    shape_of_it = dataclasses.replace(PLAIN, scales=2, ratio=STRIDE, nash_iterations=1, window=ROOM // 2)
    cfg = dataclasses.replace(small.nash_config(data__seq_len=T), model=shape_of_it)
    rng = np.random.default_rng(0)
    rows = [rows_of(rng.permutation([7, 13, 5, 9]).tolist(), seed)[1] for seed in range(8)]
    batch = small.Rows(*(np.concatenate(a)[None] for a in zip(*rows, strict=True)))
    monkeypatch.setattr("nash_mhc.train.step._ATTENTION_BLOCK", STRIDE)
    source = StoryRows(BYTES, seed=0, split="train", seq_len=T)
    source.padded_length = ROOM
    results = []
    for shape in ((1, 1, 1), (2, 2, 2)):
        run = small.mesh_config(cfg, *shape)
        mesh, made = small.make_mesh(run.mesh), small.generic_model(run.model)
        objective = make_objective(run, source)
        assert objective.keywords["execution"].padded_length == ROOM
        with jax.set_mesh(mesh):
            part = jax.tree.map(lambda a: a[0], small.to_device(batch, mesh))
            found = jax.jit(jax.value_and_grad(objective, has_aux=True))(jax.device_put(made, shardings(made, mesh)), part)
        results.append(jax.device_get(found))
    ((loss, aux), gradients), ((want_loss, want_aux), want) = results
    assert loss == pytest.approx(want_loss, rel=1e-4)
    for name, value in want_aux.health.items():
        np.testing.assert_allclose(aux.health[name], value, rtol=1e-3, atol=3e-6, err_msg=name)
    largest = max(np.linalg.norm(b) for b in jax.tree.leaves(want))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-6 * largest
    assert aux.sums["loss"].weight == sum((row.weights > 0).sum() for row in rows)


@pytest.mark.parametrize("seq_len", [256, 1024])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_short_chats_leave_little_of_a_row_empty(tmp_path, seq_len, kind):
    """A question and an answer of a few words each."""
    rng = np.random.default_rng(0)
    words = lambda: " ".join(f"{n}" for n in rng.integers(0, 99, rng.integers(1, 6 if seq_len < 1000 else 20)))
    lines = [{"prompt": f"{i} {words()}?", "response": words()} for i in range(600)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = BYTES if kind == "bytes" else load_tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    manifest = prepared(tmp_path / "out", tmp_path / "qa.jsonl", tokenizer, align=16, seq_len=seq_len)
    assert manifest.padding("train") < 0.05
    rows = PreparedRows(tmp_path / "out", "train")
    assert seq_len < rows.padded_length < 2 * seq_len
    taken = rows.take(np.arange(len(rows)))
    _, segments = planned(jnp.asarray(taken.segments), 16, -(-rows.padded_length // 16) * 16)
    blocks = np.asarray(segments).reshape(len(rows), -1, 16)
    assert (blocks == blocks[:, :, :1]).all()


def test_long_documents_are_worth_aligning(tmp_path):
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": f"{i} some words " * (20 + i)}) + "\n" for i in range(60)))
    long = prepared(tmp_path / "out", tmp_path / "long.jsonl", align=16)
    assert {split.room for split in long.splits.values()} == {None}


@pytest.mark.parametrize(("ratio", "scales"), [(2, 3), (4, 3), (3, 3), (4, 5), (5, 2)])
def test_rows_of_attention_are_whole_blocks_whatever_the_strides(ratio, scales):
    cfg = small.nash_config(data__seq_len=625 * 256 * 9, model__ratio=2)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, ratio=ratio, scales=scales, window=None))
    source = StoryRows(BYTES, seed=0, split="train", seq_len=T)
    for needed in (1, 100, 129, 600):
        source.padded_length = needed
        room = padded_attention_length(cfg.model.alignment, source)
        assert room >= needed
        assert room % cfg.model.coarsest_stride == 0
        assert room < needed + 2 * max(128, cfg.model.coarsest_stride)


def test_a_mixture_has_room_for_those_that_need_it(tmp_path):
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps({"text": f"{i}, short"}) + "\n" for i in range(3000)))
    cfg = DataConfig(dataset=f"{tmp_path}/qa.jsonl:0.5,stories:0.5", seq_len=256, cache_dir=str(tmp_path / "cache"))
    source = open_source(cfg, BYTES, split="train", seed=0, align=16)
    assert source.padded_length == source._sources[0].padded_length > 256
    objective = make_objective(small.config(), source)
    assert objective.keywords["execution"].padded_length == -(-source.padded_length // 128) * 128
