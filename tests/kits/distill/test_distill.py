"""The teacher's cache, online teachers, students and chains."""

import dataclasses
import json
import re
import shutil
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_process import CommandProcess
from runs import RUN, assert_equal_states, at, rows, untrained_run

from nash_mhc.config.schema import ConfigError, MeshConfig, ObjectiveConfig
from nash_mhc.kits.distill import cache as cache_module
from nash_mhc.kits.distill import chain
from nash_mhc.kits.distill.cache import CachedRows
from nash_mhc.kits.distill.chain import read_chain, show
from nash_mhc.kits.distill.command import cache_command, chain_command
from nash_mhc.kits.distill.settings import DistillConfig
from nash_mhc.kits.distill.teacher import check_random_vocab
from nash_mhc.loading.load import load
from nash_mhc.report.contents import contents, open_run

K = 12
DATA = ["--dataset", "stories", "--max-documents", "20", "--seq-len", "32", "--batch-size", "8", "--model-scales", "1"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A teacher that has learned the frequencies of letters."""
    learns = dataclasses.replace(RUN, optim=dataclasses.replace(RUN.optim, learning_rate=1e-3))
    return at(tmp_path_factory.mktemp("distill") / "teacher", learns, total_steps=60, evaluated=False).folder


def words(teacher, out, *more, rows=None):
    """Return arguments of `cache`; `rows`: a prepared folder to copy, which is quicker."""
    data = DATA if rows is None else ["--dataset", str(rows), "--batch-size", "8"]
    return ["--teacher", str(teacher), "--out", str(out), "--top-k", str(K), *data, *more]


def make(*args, **options):
    return cache_command(words(*args, **options))


@pytest.fixture(scope="module")
def cache(teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp("distill") / "cache"
    assert make(teacher, out, "--temperatures", "1,2") == 0
    return out


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if "teacher" in path.name}


def test_cache_holds_the_teachers_logits(teacher, cache):
    model = load(teacher).model
    for split, temperature in (("train", 1.0), ("validation", 2.0)):
        source = CachedRows(cache, split, temperature)
        got = source.take([0, len(source) - 1])
        z = np.asarray(jax.jit(model.__call__)(jnp.asarray(got.inputs), jnp.asarray(got.segments)))
        order = np.argsort(-z, axis=-1, kind="stable")[..., :K]
        counts = got.weights > 0
        np.testing.assert_array_equal(got.ids[counts], order[counts])
        want = np.take_along_axis(z, order, -1) - z.max(-1, keepdims=True)
        np.testing.assert_allclose(got.logits[counts], want[counts], atol=2e-3)
        assert (got.logits[..., 0] == 0).all()
        lse = np.log(np.exp((z - z.max(-1, keepdims=True)) / temperature).sum(-1))
        # Two programs, whose logits differ by float32's roundings: as much, however small the lse is.
        np.testing.assert_allclose(got.lse[counts], lse[counts], rtol=1e-5, atol=2e-6)


def test_random_tokens_are_cached_and_used_in_training(teacher, cache, tmp_path):
    out = tmp_path / "cache"
    assert make(teacher, out, "--temperatures", "2", "--random", "5", rows=cache) == 0
    plain, more = (CachedRows(folder, "train", 2.0).take([0, 7]) for folder in (cache, out))
    np.testing.assert_array_equal(more.ids[..., :K], plain.ids)
    np.testing.assert_array_equal(more.logits[..., :K], plain.logits)
    assert more.ids.shape[-1] == K + 5
    assert not (more.ids[..., None, K:] == more.ids[..., :K, None]).any()
    assert more.ids.max() < RUN.model.vocab_size
    run = at(tmp_path / "run", student(out, total_steps=2, eval_interval=2), evaluated=False)
    assert rows(run.folder)[-1]["kl"] > 0
    assert json.loads((run.folder / "run.json").read_text())["config"]["distill"]["random"] == 5
    other = dataclasses.replace(student(out), model=dataclasses.replace(STUDENT.model, vocab_size=300))
    with pytest.raises(ConfigError, match=r"vocabulary of 257, but the model has 300"):
        at(tmp_path / "other", other)


@pytest.mark.parametrize(("init_from", "remedy"), [(None, "set --model-vocab-size 300, or leave out"), ("base", "leave out")])
def test_remedy_names_the_vocabulary_only_if_it_can_be_set(init_from, remedy):
    is_fixed = init_from is not None
    with pytest.raises(ConfigError, match=f"the model has 257; {remedy} --distill-random$"):
        check_random_vocab("--distill-teacher t", 300, 257, is_fixed=is_fixed, remedy="leave out --distill-random")


def test_a_stopped_cache_resumes_to_the_same_bytes(teacher, cache, tmp_path, monkeypatch):
    out, seen = tmp_path / "cache", 0
    write = cache_module._own_records

    def killed(found, form):
        nonlocal seen
        seen += 1
        if seen == 8:
            raise KeyboardInterrupt
        return write(found, form)

    monkeypatch.setattr(cache_module, "_PROGRESS_INTERVAL", 3)
    monkeypatch.setattr(cache_module, "_own_records", killed)
    with pytest.raises(KeyboardInterrupt):
        make(teacher, out, "--temperatures", "1,2")
    (note,) = out.glob("*.note")
    assert int(note.read_text()) == 48  # six batches; the seventh is written but not recorded
    (part,) = out.glob("*.teacher.partial")
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])  # and not all of it
    monkeypatch.setattr(cache_module, "_own_records", write)
    computed = []
    monkeypatch.setattr(cache_module, "_batch", lambda *args, of=cache_module._batch: (computed.append(args[1]), of(*args))[1])
    assert make(teacher, out, "--temperatures", "1,2") == 0
    assert computed[0].start == 48
    assert files(out) == files(cache)
    assert make(teacher, out, "--temperatures", "1,2") == 0  # all is there
    assert files(out) == files(cache)


def test_cache_is_the_same_on_a_mesh(teacher, cache, tmp_path):
    mesh = ["--mesh-data", "2", "--mesh-fsdp", "2", "--mesh-tp", "2"]
    assert make(teacher, tmp_path / "c", "--temperatures", "1,2", *mesh, rows=cache) == 0
    assert_the_same_is_found(cache, tmp_path / "c")


def assert_the_same_is_found(one, other):
    one, other = (CachedRows(folder, "train", 1.0) for folder in (one, other))
    a, b = one.take(range(len(one))), other.take(range(len(one)))
    assert (a.ids == b.ids).mean() > 0.999  # two that are equally likely may change places
    np.testing.assert_allclose(a.logits, b.logits, atol=4e-3)
    np.testing.assert_allclose(a.lse, b.lse, atol=1e-5)


@pytest.mark.long
def test_cache_is_the_same_with_two_processes(teacher, cache, tmp_path):
    """The processes share only the folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    asked = words(teacher, tmp_path / "two", "--temperatures", "1,2", "--mesh-data", "2", rows=cache)
    command = ["-m", "nash_mhc.distill", "cache", *asked]
    command += ["--coordinator-address", address, "--num-processes", "2", "--process-id"]
    both = [CommandProcess([*command, number], tmp_path) for number in "01"]
    ended = [process.end() for process in both]
    assert [process.returncode for process in ended] == [0, 0], ended
    assert_the_same_is_found(cache, tmp_path / "two")  # its hashes were right, too
    assert not list((tmp_path / "two").glob("*.partial*"))


STUDENT = dataclasses.replace(
    RUN,
    model=dataclasses.replace(RUN.model, ffn=32),
    objective=ObjectiveConfig(name="distill"),
    of_kits=(DistillConfig(temperature=2.0, text=0.1, hard=0.05),),
    optim=dataclasses.replace(RUN.optim, learning_rate=1e-3),
)


def student(cache, **changes):
    cfg = dataclasses.replace(STUDENT, data=dataclasses.replace(STUDENT.data, dataset=str(cache)))
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))


@pytest.fixture(scope="module")
def unbroken(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill") / "student"
    return at(folder, student(cache, total_steps=40, checkpoint_interval=20, eval_interval=20))


def test_training_reduces_the_divergence(unbroken, tmp_path):
    scored = rows(unbroken.folder, "eval.jsonl")
    assert scored[-1]["eval/kl"] < 0.7 * scored[0]["eval/kl"]
    assert scored[-1]["eval/agreement"] > scored[0]["eval/agreement"]
    trained = rows(unbroken.folder)[-1]
    parts = 4 * 0.85 * trained["kl"] + 0.1 * trained["loss"] + 0.05 * trained["loss/hard"]
    assert trained["objective"] == pytest.approx(parts, rel=1e-4)
    # One name, one quantity: what is measured in training is what is measured of held-out text.
    assert trained["loss"] == pytest.approx(scored[-1]["eval/loss"], rel=0.1)
    (page,) = [contents(open_run(unbroken.folder))]
    assert page["rows"]["loss"][-1] == pytest.approx(trained["loss"], rel=1e-5)
    assert page["rows"]["kl"][-1] == pytest.approx(trained["kl"], rel=1e-5)
    assert page["facts"]["held-out KL from the teacher, nats/token"] == f"{scored[-1]['eval/kl']:.4f}"
    shown = show([{"name": "few", "step": 40, "loss": scored[-1]["eval/loss"], "kl": scored[-1]["eval/kl"]}], tmp_path)
    assert re.search(rf"few +40 +{scored[-1]['eval/loss']:.4f} +1.000 +{scored[-1]['eval/kl']:.4f}", shown)


def test_a_student_resumes_bit_for_bit(cache, unbroken, tmp_path):
    copy = shutil.copytree(unbroken.folder, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "40")
    assert_equal_states(
        at(copy, student(cache, total_steps=40, checkpoint_interval=20, eval_interval=20)).state, unbroken.state
    )


@pytest.mark.long  # the online teacher's student below trains on a mesh, too
def test_a_student_trains_the_same_on_a_mesh(cache, unbroken, tmp_path):
    ends = []
    for name, mesh in (("one", MeshConfig()), ("mesh", MeshConfig(data=2, fsdp=2, tp=2))):
        copy = shutil.copytree(unbroken.folder, tmp_path / name)
        shutil.rmtree(copy / "checkpoints" / "40")
        ends.append(at(copy, dataclasses.replace(student(cache, total_steps=22), mesh=mesh), evaluated=False).state)
    assert_equal_states(ends[1].model, ends[0].model, atol=2e-5)


def test_an_online_teacher_gives_the_logits_of_its_cache(teacher, cache, tmp_path):
    short = {"total_steps": 3, "eval_interval": 3}
    cached = at(tmp_path / "cached", student(cache, **short))
    taught = dataclasses.replace(STUDENT.section(DistillConfig), teacher=str(teacher), top_k=K)
    online = lambda **changes: student(cache, **(short | changes)).with_section(taught)
    unbroken = at(tmp_path / "online", online(checkpoint_interval=1), evaluated=False)
    assert_equal_states(unbroken.state.model, cached.state.model, atol=1e-6)
    copy = shutil.copytree(tmp_path / "online", tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "3")
    assert_equal_states(at(copy, online(), evaluated=False).state, unbroken.state)
    shutil.rmtree(copy / "checkpoints" / "3")
    meshed = dataclasses.replace(online(), mesh=MeshConfig(data=2, fsdp=2, tp=2))
    on_mesh = at(shutil.copytree(copy, tmp_path / "mesh"), meshed)  # from its second step on
    assert_equal_states(on_mesh.state.model, cached.state.model, atol=2e-5)
    assert on_mesh.evaluation["eval/kl"] == pytest.approx(cached.evaluation["eval/kl"], rel=1e-4)
    other = online().with_section(dataclasses.replace(taught, teacher=str(tmp_path / "cached")))
    with pytest.raises(ConfigError, match=r"or the model in --distill-teacher .* has changed since this run began"):
        at(copy, other)


@pytest.mark.long
def test_a_student_equal_to_its_teacher_has_no_divergence(cache, tmp_path):
    """Cached and online, where the table has more columns than the tokenizer has tokens."""
    cfg = dataclasses.replace(STUDENT, model=dataclasses.replace(STUDENT.model, vocab_size=300))
    begun = untrained_run(tmp_path / "begun", cfg)
    assert make(begun, tmp_path / "taught", "--temperatures", "2", rows=cache) == 0
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, dataset=str(tmp_path / "taught")))
    cfg = cfg.with_section(dataclasses.replace(cfg.section(DistillConfig), anchor=1e-3, top_k=K))
    run = at(tmp_path / "run", cfg, evaluated=False, total_steps=1, log_interval=1, init_from=str(begun))
    (row,) = rows(run.folder)
    assert abs(row["kl"]) < 1e-6 and abs(row["loss/anchor"]) < 1e-6


@pytest.mark.long
def test_losses_of_layers_and_anchor_start_at_zero_and_are_minimized(teacher, cache, tmp_path):
    begun, shown = untrained_run(tmp_path / "begun", STUDENT), tmp_path / "shown"

    def run(name, taught_by, anchor):
        shutil.rmtree(shown, ignore_errors=True)
        shutil.copytree(taught_by, shown)  # in one place, whoever it is: the program knows its teacher by name
        cfg = student(cache, total_steps=10, eval_interval=0, log_interval=1, init_from=str(begun))
        distill = DistillConfig(teacher=str(shown), top_k=K, text=1.0, layers=0.5, anchor=anchor)
        return rows(at(tmp_path / name, cfg.with_section(distill), evaluated=False).folder)

    (first, *_) = run("same", begun, 1e-3)  # its own teacher
    assert first["loss/layers"] < 1e-5 and first["loss/anchor"] < 1e-5
    loose, held = run("loose", teacher, 1e-3), run("held", teacher, 20.0)
    assert loose[-1]["loss/layers"] < 0.8 * loose[0]["loss/layers"]
    assert 1e-4 < held[-1]["loss/anchor"] < 0.7 * loose[-1]["loss/anchor"]
    last = held[-1]
    parts = 0.5 * last["loss"] + 0.5 * last["loss/layers"] + 20 * last["loss/anchor"]
    assert last["objective"] == pytest.approx(parts, rel=1e-4)


def test_settings_that_do_not_fit_are_refused(teacher, cache, tmp_path):
    def refused(cfg, message):
        with pytest.raises(ConfigError, match=message):
            at(tmp_path / "run", cfg)
        assert not (tmp_path / "run").exists()

    for asked, message in (
        ({"layers": 0.5}, "--distill-layers: a cache contains no layer outputs"),
        ({"anchor": 0.1}, "--distill-anchor: .*--init-from"),
        ({"teacher": str(tmp_path / "nobody")}, "nobody"),
        ({"teacher": str(teacher), "top_k": 257, "random": 3}, "--distill-random 3: --distill-top-k 257"),
    ):
        refused(student(cache).with_section(DistillConfig(**asked)), message)
    with pytest.raises(ConfigError, match=r"--distill-teacher .* without --objective distill"):
        RUN.with_section(DistillConfig(teacher=str(teacher)))
    refused(student("stories"), "--dataset stories: .*python -m nash_mhc.distill cache")
    warm = student(cache).with_section(DistillConfig(temperature=3.0))
    refused(warm, "--distill-temperature 3: .* 1, 2;")
    other = shutil.copytree(cache, tmp_path / "other")
    (other / "manifest.json").write_text((cache / "manifest.json").read_text().replace('"bytes": ', '"bytes": 1'))
    refused(student(other), "--dataset .*other: the text has changed")
    longer = dataclasses.replace(student(cache), data=dataclasses.replace(student(cache).data, seq_len=64))
    refused(longer, "sequence length 32")
    spoilt = shutil.copytree(cache, tmp_path / "spoilt")
    name = next(path for path in spoilt.iterdir() if path.suffix == ".teacher")
    name.write_bytes(bytes([name.read_bytes()[0] ^ 1]) + name.read_bytes()[1:])
    refused(student(spoilt), f"{name.name}: the content has changed")
    with pytest.raises(ConfigError, match=r"--out .*another top k"):
        cache_command(["--teacher", str(teacher), "--out", str(cache), "--top-k", "3", "--temperatures", "1,2", *DATA])
    info = json.loads((cache / "teacher.json").read_text())
    assert "folder" not in json.dumps(info)  # it may lie anywhere


def test_a_prepared_folder_is_copied_unless_its_tokenizer_differs(teacher, cache, tmp_path):
    again = tmp_path / "again"
    assert make(teacher, again, "--temperatures", "1,2", rows=cache) == 0
    assert files(again) == files(cache)
    other = shutil.copytree(cache, tmp_path / "other")
    values = json.loads((other / "manifest.json").read_text())
    values["recipe"]["tokenizer"]["fingerprint"] = "another"
    (other / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="was not prepared with the teacher's tokenizer"):
        make(teacher, tmp_path / "new", rows=other)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("flags", "message"), [
    (["--out", "x"], "--teacher is missing"),
    (["--teacher", "x"], "--out is missing"),
    (["--teacher", "x", "--out", "y", "--top-k", "0"], "--top-k must be at least 1"),
    (["--teacher", "x", "--out", "y", "--random", "-1"], "--random must be at least 0"),
    (["--teacher", "x", "--out", "y", "--temperatures", "1,warm"], "--temperatures 1,warm: .*above 0"),
])  # fmt: skip
def test_invalid_flags_of_cache(flags, message):
    with pytest.raises(ConfigError, match=message):
        cache_command(flags)


CHAIN = """
teacher: {model_width: 32, model_heads: 8, model_kv_heads: 8, model_head_dim: 4, model_ffn: 64, model_scales: 1,
  model_window: null, model_full_every: 0, model_conv_taps: 0, model_residual: plain, batch_size: 4, seq_len: 32,
  total_steps: 2, warmup_steps: 0, eval_interval: 2, eval_batches: 1, sample_tokens: 0}
cache: {dataset: stories, max_documents: 4, seq_len: 32, batch_size: 4, top_k: 4, model_scales: 1}
student: {model_width: 32, model_heads: 8, model_kv_heads: 8, model_head_dim: 4, model_ffn: 64, model_scales: 1,
  model_window: null, model_full_every: 0, model_conv_taps: 0, model_residual: plain, batch_size: 4, seq_len: 32,
  objective: distill, warmup_steps: 0, eval_interval: 2, eval_batches: 1, sample_tokens: 0}
stages:
  - {name: few, quantize: "none,2/0", quantize_group: 8, total_steps: 2}
pack: few
"""


@pytest.mark.long  # trains, caches and packs in three processes
def test_a_chain_resumes(teacher, tmp_path, monkeypatch):
    """The teacher and the cache are complete, as after a stop."""
    monkeypatch.setattr(chain, "_exit_code", lambda argv: CommandProcess(argv[1:], tmp_path).end().returncode)
    file, out = tmp_path / "chain.yaml", tmp_path / "out"
    file.write_text(CHAIN)
    links = read_chain(file, out)
    shutil.copytree(teacher, out / "teacher")
    assert links[1].argv[0] == "cache" and cache_command(links[1].argv[1:]) == 0
    there = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert chain_command([str(file), "--out", str(out)]) == 0
    assert there.items() <= {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}.items()
    (row,) = json.loads((out / "chain.json").read_text())
    assert row["name"] == "few" and row["kl"] > 0
    assert load(out / "few-packed").config.to_dict()["quantize"]["weights"] is None
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != "chain.json"}
    assert chain_command([str(file), "--out", str(out)]) == 0  # all is there
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != "chain.json"}


def test_a_chain_file_is_checked_first(tmp_path):
    file = tmp_path / "chain.yaml"
    file.write_text(CHAIN)
    assert [(link.name, link.module, link.is_run) for link in read_chain(file, tmp_path / "out")] == [
        ("teacher", "nash_mhc.train", True), ("cache", "nash_mhc.distill", False), ("few", "nash_mhc.train", True),
        ("few-packed", "nash_mhc.hub", False),
    ]  # fmt: skip
    for before, after, message in (
        ("total_steps: 2}\npack", "totl_steps: 2}\npack", "stage 1: unknown key totl_steps; did you mean total_steps"),
        ("none,2/0", "9/4,2/0", "few: --quantize 9/4,2/0: must be"),
        ("pack: few", "pack: two", "pack two.* teacher, few"),
        ("name: few,", "name: few, from: four,", "stage 1: from four.* fresh, teacher"),
        ("stages:", "stage:", "stages"),
    ):
        file.write_text(CHAIN.replace(before, after))
        with pytest.raises(ConfigError, match=message):
            chain_command([str(file), "--out", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()
