"""The planner: machine names, ranking, advice if nothing fits, and errors."""

import dataclasses
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import small
from runs import described_run

from nash_mhc.config import parsing, presets
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.help import as_flags
from nash_mhc.config.schema import ConfigError
from nash_mhc.estimate.candidates import candidates, larger_that_fits, sequence_per_chip, smaller_remats
from nash_mhc.estimate.memory import estimate
from nash_mhc.estimate.roofline import ERROR, speed
from nash_mhc.model.architectures import count_parameters, for_platform
from nash_mhc.plan import __main__ as command
from nash_mhc.plan import verify
from nash_mhc.runtime.chips import by_kind, chips, machine
from nash_mhc.train.inferred_settings import infer_settings


def planned(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    code = one_line_errors(command.main)
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_every_chip_has_its_facts_and_where_they_are_from():
    for chip in chips().values():
        assert chip.source and chip.kinds and chip.slices, chip.name
        assert all(count == math.prod(map(int, shape.split("x"))) for count, shape in chip.slices.items()), chip.name
        assert by_kind(chip.kinds[0]) is chip  # no other chip has this name


@pytest.mark.parametrize(
    ("name", "count", "slices"),
    [
        ("v6e-8", 8, 1), ("v6e", 1, 1), ("v5p-8", 4, 1), ("v6e-4096", 4096, 16), ("h100-16", 16, 2), ("a100-80", 1, 1),
        ("a100-80-8", 8, 1),
    ],
)  # fmt: skip
def test_a_machine_has_as_many_chips_as_its_vendor_means(name, count, slices):
    found = machine(name, chips())
    assert (found.chips, found.slices) == (count, slices)


@pytest.mark.parametrize(
    ("name", "said"),
    [("v6f-8", "did you mean v6e"), ("v6e-7", "did you mean v6e-8"), ("l4-16", "network_gbps"), ("h100-x", "number")],
)  # fmt: skip
def test_a_machine_that_is_not_there_is_one_line_with_the_nearest(monkeypatch, capsys, name, said):
    code, out, err = planned(monkeypatch, capsys, "--chip", name)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_file_of_the_user_changes_prices_and_adds_chips(tmp_path):
    file = tmp_path / "chips.yaml"
    file.write_text("v6e: {dollars: 1.5, from: my contract}\n")
    assert (chips(str(file))["v6e"].dollars, chips(str(file))["v6e"].tflops) == (1.5, chips()["v6e"].tflops)
    file.write_text("v6e: {dolars: 1.5}\n")
    chips.cache_clear()
    with pytest.raises(ConfigError, match="no key dolars; did you mean dollars"):
        chips(str(file))


def test_the_best_fits_and_divides_and_none_that_fits_is_faster():
    cfg, at = presets.run("3b"), machine("v6e-8", chips())
    found = candidates(cfg, at, {})
    fitting = [c for c in found if c.fits == "yes"]
    assert found[0] is max(fitting, key=lambda c: c.speed.tokens_per_s)
    assert len({tuple(c.settings.items()) for c in found}) == len(found)
    for c in found:
        assert c.mesh["data"] * c.mesh["fsdp"] * c.mesh["tp"] == 8
        assert c.cfg.data.batch_size * c.cfg.train.grad_accum == cfg.data.batch_size  # the sequences per step stay
        assert c.memory.total == pytest.approx(sum(vars(c.memory).values()))


def test_what_the_user_has_set_stays():
    cfg, at = presets.run("3b"), machine("v6e-8", chips())
    wanted = {"mesh.tp": 2, "train.remat": "full"}
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, remat="full"))
    assert all(c.mesh["tp"] == 2 and c.cfg.train.kept == "full" for c in candidates(cfg, at, wanted))


def test_where_no_remat_was_chosen_what_is_kept_by_name_is_tried_as_well():
    """The preset `1b` sets --remat-keep, the user does not; the command sets both."""
    at = machine("h200", chips())
    found = {c.cfg.train.kept: c for c in candidates(presets.run("1b"), at, {"train.grad_accum": 1})}
    assert found.keys() == {"none", "dots+ffn-up", "dots", "full"}
    for kept, c in found.items():
        words = ["--model-size", "1b", *as_flags(c.settings)]
        assert parsing.parse(words).config.train.kept == kept
    assert found["dots"].memory.total < found["dots+ffn-up"].memory.total < found["none"].memory.total
    assert found["dots"].speed.tokens_per_s < found["dots+ffn-up"].speed.tokens_per_s


@pytest.mark.parametrize(
    ("kept", "smaller"),
    [
        ("none", ["none", "dots+ffn-up", "dots", "full"]),
        ("dots+ffn-up", ["dots+ffn-up", "dots", "full"]),
        ("dots", ["dots", "full"]),
        ("dots+attention", ["dots+attention", "dots", "full"]),
        ("full+read", ["full+read", "full"]),
    ],
)
def test_where_memory_ran_out_nothing_more_is_kept(kept, smaller):
    remat, _, keep = kept.partition("+")
    cfg = presets.run("small")
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, remat=remat, remat_keep=keep or None))
    assert ["+".join(filter(None, each)) for each in smaller_remats(cfg.train)] == smaller


def test_the_command_of_the_winner_is_one_that_train_takes(monkeypatch, capsys, tmp_path):
    file = tmp_path / "plan.json"
    words = ["--model-size", "3b", "--chip", "v6e-8", "--seq-len", "2048", "--tokens", "100B", "--json", str(file)]
    code, out, _ = planned(monkeypatch, capsys, *words)
    figures = json.loads(file.read_text())
    assert code == 0 and figures["command"] in out
    parsed = parsing.parse(figures["command"].split()[3:]).config
    best = figures["candidates"][0]
    assert (parsed.model_size, parsed.data.seq_len, parsed.train.kept) == ("3b", 2048, best["remat"])
    assert parsed.mesh.axes == {axis: best[axis] for axis in ("data", "fsdp", "tp")}
    assert best["figures"] == "computed"
    assert best["hours"] == pytest.approx(100e9 / best["tokens_per_s"] / 3600)
    assert best["dollars"] == pytest.approx(best["hours"] * 8 * chips()["v6e"].dollars)


QWEN = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def figures_of(monkeypatch, capsys, *words):
    code, out, err = planned(monkeypatch, capsys, *words, "--json", "-")
    assert code == 0, err
    return json.loads(out)


def test_named_folders_and_profiles_are_planned_for(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    found = figures_of(monkeypatch, capsys, "--chip", "v6e-8", "--init-from", str(tmp_path), "--tokens", "1B")
    assert found["parameters"] == 596_049_920  # of Qwen3-0.6B
    assert found["candidates"][0]["dollars"] > 1 and f"--init-from {tmp_path}" in found["command"]
    tall = figures_of(monkeypatch, capsys, "--chip", "v6e", "--profile-for", "tpu")
    assert "1 x 64 x " in tall["candidates"][0]["batch"]
    puzzle = figures_of(monkeypatch, capsys, "--chip", "v6e", "--model-kind", "recursive", "--dataset", "sudoku4",
                        "--objective", "puzzle", "--no-model-causal")  # fmt: skip
    assert puzzle["candidates"][0]["batch"].endswith(" x 16")  # cells
    code, _, err = planned(monkeypatch, capsys, "--chip", "v6e-8", "--init-from", str(tmp_path / "nowhere"))
    assert code == 2 and "nowhere: no such folder" in err


def test_the_folder_of_a_run_is_planned_for_by_its_recorded_settings(monkeypatch, capsys, tmp_path):
    cfg = small.config(data__batch_size=16)
    described_run(tmp_path / "run", cfg)
    found = figures_of(monkeypatch, capsys, "--chip", "v6e", str(tmp_path / "run"))
    assert found["parameters"] == count_parameters(cfg.model)
    assert f"{tmp_path}/run" in found["command"] and found["candidates"][0]["batch"].endswith(" x 32")


def test_a_preset_has_its_own_vocabulary_until_data_is_named_and_the_command_trains_that_model(monkeypatch, capsys):
    own = figures_of(monkeypatch, capsys, "--chip", "v6e-8", "--model-size", "small")
    assert own["parameters"] == count_parameters(presets.model("small"))
    assert parsing.parse(own["command"].split()[3:], found=infer_settings).config.model == presets.model("small")
    named = figures_of(monkeypatch, capsys, "--chip", "v6e-8", "--model-size", "small", "--dataset", "stories")
    assert named["parameters"] == own["parameters"] - 640 * (65_536 - 384)  # bytes, padded
    model = parsing.parse(named["command"].split()[3:], found=infer_settings).config.model
    assert count_parameters(model) == named["parameters"]


def test_a_teacher_costs_its_bytes_and_its_time(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    words = ["--chip", "h200", "--init-from", str(tmp_path), "--batch-size", "8", "--grad-accum", "1", "--remat", "full"]
    alone = figures_of(monkeypatch, capsys, *words)["candidates"][0]
    distill = ["--objective", "distill", "--distill-teacher", str(tmp_path), "--distill-anchor", "0.1"]
    taught = figures_of(monkeypatch, capsys, *words, *distill)["candidates"][0]
    weights = 2 * 4 * 596_049_920 / 2**30
    assert taught["gib_by_category"]["teachers"] == pytest.approx(weights)
    assert weights <= taught["gib"] - alone["gib"] < 1.1 * weights
    assert taught["compute_s"] == pytest.approx(alone["compute_s"] * (1 + 2 / 4), rel=0.05)  # two more forward passes
    code, _, err = planned(monkeypatch, capsys, *words, *distill[:2], "--distill-teacher", str(tmp_path / "nobody"))
    assert code == 2 and "nobody" in err and err.count("\n") == 1


def test_one_chip_is_no_mesh_of_eight(monkeypatch, capsys):
    mesh = "--mesh-data 2 --mesh-fsdp 2 --mesh-tp 2".split()
    code, out, _ = planned(monkeypatch, capsys, "--model-size", "3b", "--chip", "v6e-1", *mesh)
    assert code == 0 and out.startswith("v6e-1 is 1 chip, and mesh 2x2x2 needs 8: this is the plan for v6e-8")
    code, _, err = planned(monkeypatch, capsys, "--chip", "v6e-1", "--mesh-data", "3")
    assert code == 2 and re.search(r"needs 3 chips.*v6e-1 has 1", err)


@pytest.mark.long
def test_where_nothing_fits_a_larger_machine_is_named(monkeypatch, capsys):
    cfg, at = presets.run("3b"), machine("v6e-1", chips())
    assert {c.fits for c in candidates(cfg, at, {})} == {"no"}
    larger, best = larger_that_fits(cfg, at, {})
    assert larger.name == "v6e-4" and best.fits == "yes"
    code, out, _ = planned(monkeypatch, capsys, "--model-size", "3b", "--chip", "v6e-1")
    assert code == 0 and "nothing fits" in out and "--chip v6e-4" in out and "nash_mhc.train" not in out


def test_a_few_rows_are_made_enough_for_many_chips_unless_they_were_given():
    cfg, at = presets.run("3b"), machine("v6e-256", chips())
    assert sequence_per_chip(cfg.data, cfg.train, at.chips, {})["data"].batch_size == 256
    assert sequence_per_chip(cfg.data, cfg.train, at.chips, {"data.batch_size": 8}) == {}


DENSE = {"scales": 1, "window": None, "conv_taps": 0}
EARLIER = {"scales": 3, "ratio": 4, "residual": "mhc"}  # the architecture of the presets until 2026-11-18
# Measured on one H200 (docs/experiments.md): (size, changes of the model, sequences, T, remat, unroll, tokens/s).
# The shares of the roofline were chosen before those from the sixth on were measured.
MEASURED = [
    ("1b", {**DENSE, "residual": "plain"}, 8, 4096, "dots", "auto", 77_203),
    ("1b", {**DENSE, "residual": "plain"}, 16, 4096, "dots", "auto", 79_325),
    ("small", {**DENSE, "residual": "plain"}, 16, 2048, "none", "auto", 554e3),
    pytest.param("small", EARLIER, 16, 2048, "none", "auto", 327e3, marks=pytest.mark.long),
    pytest.param("small", EARLIER, 8, 8192, "none", "no", 270.9e3, marks=pytest.mark.long),
    ("small", {**DENSE, "residual": "mhc"}, 8, 8192, "none", "no", 319.5e3),
    ("1b", {**DENSE, "residual": "plain"}, 8, 4096, "dots+ffn-up", "auto", 84_810),
    ("1b", EARLIER, 8, 4096, "dots+ffn-up", "auto", 65_090),
    ("1b", {}, 8, 4096, "dots+ffn-up", "auto", 78_399),
    ("1b", {**DENSE, "residual": "mhc-layer"}, 8, 4096, "dots+ffn-up", "auto", 81_920),
    ("small", {}, 32, 2048, "dots", "auto", 430_103),
    ("small", {**DENSE, "residual": "plain"}, 32, 2048, "dots", "auto", 525_584),
]


@pytest.mark.parametrize(("size", "changed", "rows", "T", "remat", "unroll", "measured"), MEASURED)
def test_the_speed_is_within_its_error_of_what_was_measured(size, changed, rows, T, remat, unroll, measured):
    cfg = presets.run(size)
    model = dataclasses.replace(cfg.model, vocab_size=16_384 if size == "small" else cfg.model.vocab_size, **changed)
    data = dataclasses.replace(cfg.data, batch_size=rows, seq_len=T)
    remat, _, keep = remat.partition("+")
    train = dataclasses.replace(cfg.train, remat=remat, remat_keep=keep or None, unroll=unroll)
    cfg = dataclasses.replace(cfg, model=model, data=data, train=train)
    cfg, at = for_platform(cfg, "gpu"), machine("h200", chips())
    found = speed(cfg, cfg.mesh.axes, at, estimate(cfg, cfg.mesh.axes))
    assert found.tokens_per_s == pytest.approx(measured, rel=ERROR)


def test_a_slower_chip_or_link_is_never_faster():
    cfg, at = for_platform(presets.run("3b"), "tpu"), machine("v6e-8", chips())
    mesh = {"data": 2, "fsdp": 2, "tp": 2}
    memory = estimate(cfg, mesh)
    before = speed(cfg, mesh, at, memory)
    for fact in ("tflops", "memory_gbps", "links_gbps"):
        slower = dataclasses.replace(at.chip, **{fact: getattr(at.chip, fact) / 50})
        after = speed(cfg, mesh, dataclasses.replace(at, chip=slower), memory)
        assert after.tokens_per_s < before.tokens_per_s
        assert after.times.bound_by == {"tflops": "compute", "memory_gbps": "memory", "links_gbps": "tp"}[fact]


@pytest.mark.parametrize(("text", "number"), [("100B", 100e9), ("2.5e10", 2.5e10), ("300k", 3e5), ("7", 7.0)])
def test_tokens_are_read_as_people_write_them(text, number):
    assert command.number_of_tokens(text) == number


@pytest.mark.parametrize(
    "words", [("--tokens", "lots"), ("--top", "0"), ("--json", "/no/such/folder/x"), ("--batch-size", "3")]
)
def test_a_mistake_is_one_line(monkeypatch, capsys, words):
    code, out, err = planned(monkeypatch, capsys, "--model-size", "3b", "--chip", "v6e-8", *words)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1


def test_the_compiler_is_asked_for_the_same_settings_and_its_answer_is_marked(monkeypatch):
    """Check the command instead of compiling for minutes; the tests of `bench compile` run the compiler."""
    asked = []

    def started(words, **options):
        asked.append(words)
        answer = {"peak_gib_per_chip": 20.0, "live_gib_per_chip": 16.0, "compile_s": 61.0, "collectives": "all-gather 3"}
        return SimpleNamespace(returncode=0, stdout=json.dumps(answer), stderr="")

    monkeypatch.setattr(verify.subprocess, "run", started)
    at = machine("v6e-8", chips())
    best = candidates(presets.run("3b"), at, {})[0]
    for here, topology in ((None, "cpu"), (object(), "v6e:2x4")):
        monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name, here=here: here)
        told = verify.verify(best, {"model_size": "3b"}, at)
        words = asked[-1][asked[-1].index("compile") + 1 :]
        assert words[words.index("--topology") + 1] == topology == told["compiled_for"]
        cfg = parsing.parse(words[: words.index("--topology")]).config
        assert cfg.mesh.axes == best.mesh and cfg.train.kept == best.cfg.train.kept and cfg.model_size == "3b"
        assert told["figures"] == "compiled" and bool(told["left_out"]) == (topology == "cpu")
        assert told["compiled_gib"] == (20.0 if topology == "cpu" else 16.0)
    with pytest.raises(ConfigError, match="up to 256 chips"):
        verify.verify(best, {}, machine("v6e-512", chips()))


def test_twice_the_chips_with_twice_the_rows_are_nearly_twice_as_fast():
    """With data parallelism, each chip does the same work, and the gradient sum overlaps with it."""
    each = []
    for chips_there in (8, 16):
        at, mesh = machine(f"v6e-{chips_there}", chips()), {"data": chips_there // 8, "fsdp": 8, "tp": 1}
        cfg = presets.run("3b")
        cfg = for_platform(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=chips_there)), "tpu")
        each.append(speed(cfg, mesh, at, estimate(cfg, mesh)))
    assert each[1].tokens_per_s == pytest.approx(2 * each[0].tokens_per_s, rel=0.05)
    assert each[1].mfu == pytest.approx(each[0].mfu, rel=0.05) and each[0].mfu < 0.68
