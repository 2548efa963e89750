"""The benchmarks run the real step and report consistent figures; the comparison of models is a fair one."""

import dataclasses
import functools
import io
import json
import logging
import math
import re
import statistics
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small
from jax.experimental import topologies
from runs import described_run

from nash_mhc.bench import __main__ as command
from nash_mhc.bench import findings, quality, step
from nash_mhc.bench.step import bench_compile, bench_step
from nash_mhc.config import ConfigError, logs
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.lm import flops_per_token
from nash_mhc.runtime import hardware
from nash_mhc.runtime.hardware import known_peak
from nash_mhc.train import device_batches, evaluate


def test_figures_follow_from_one_another(monkeypatch):
    # What the machine could do at best is asked for twice, for a second each: a glance will do.
    monkeypatch.setattr(step, "matmul_rate", lambda dtype, device, seconds: hardware.matmul_rate(dtype, device, seconds=0.02))
    cfg = small.config(optim__z_loss=1.25e-4)  # a program that no other test has compiled in this process
    figures = bench_step(cfg, steps=2, warmup=1)
    seconds = figures["step_ms"] / 1e3
    tokens = cfg.data.batch_size * cfg.data.seq_len
    assert figures["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert figures["tflops_per_s"] == pytest.approx(flops_per_token(cfg.model, cfg.data.seq_len) * tokens / seconds / 1e12)
    assert figures["share_of_matmul"] == pytest.approx(figures["tflops_per_s"] / figures["matmul_tflops_per_s"])
    assert figures["step_ms_min"] <= figures["step_ms"] <= figures["step_ms_max"]
    assert figures["compile_s"] > 0
    assert figures["peak_memory_gib"] > 0
    assert figures["last_loss"] < figures["first_loss"]  # it really trains, on the one batch it is given
    assert figures["finite"]


def test_a_topology_that_cannot_be_described_is_one_line(monkeypatch):
    def absent(**_):
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(topologies, "get_topology_desc", absent)
    with pytest.raises(ConfigError, match=r"^--topology v6e:2x4.*no compiler.*libtpu"):
        bench_compile(small.mesh_config(small.config(), 2, 2, 2), "v6e:2x4")


def test_a_mesh_that_does_not_fill_the_topology_is_refused(monkeypatch):
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: SimpleNamespace(devices=[None] * 8))
    with pytest.raises(ConfigError, match=r"--topology .* 8 chips.* mesh.* 4\b"):
        bench_compile(small.mesh_config(small.config(), 2, 2, 1), "v6e:2x4")


def test_compiling_for_a_topology_reports_memory_and_collectives(monkeypatch):
    """The whole path with host devices in the place of chips:
    bfloat16, the mesh's own shardings, figures that add up."""
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: SimpleNamespace(devices=jax.devices()))
    monkeypatch.setattr(topologies, "make_mesh", lambda described, shape, names: jax.make_mesh(shape, names))
    cfg = small.mesh_config(small.config(train__dtype="auto", train__attention="xla"), 2, 2, 2)
    figures = bench_compile(cfg, "v6e:2x4")
    assert figures["topology"] == "v6e:2x4, mesh 2x2x2 (data x fsdp x tp)"
    assert figures["peak_gib_per_chip"] >= figures["state_and_batch_gib"] > 0
    assert figures["live_gib_per_chip"] > 0
    assert "all-gather" in figures["collectives"]
    assert figures["compile_s"] > 0


def test_peaks_are_those_of_the_named_chip():
    kinds = (
        "NVIDIA H200",
        "NVIDIA GB200",
        "NVIDIA B200",
        "NVIDIA L40",
        "NVIDIA L4",
        "TPU v5",
        "TPU v5 lite",
        "TPU v6 lite",
        "cpu",
    )
    assert [known_peak(k) for k in kinds] == [989, 2450, 2250, 181, 121, 459, 197, 918, None]


# The full architecture, as quick to compile as it gets.
MINUTE = ModelConfig(
    width=32, layers=1, heads=4, kv_heads=4, head_dim=8, ffn=64, scales=2, ratio=4, window=8, nash_iterations=1, streams=2,
    conv_taps=2,
)  # fmt: skip
# Stories are longer than 32 tokens: only the last rows of each 64 hold several, and all batches together reach them.
STEPS, SEEDS, B, EVAL_BATCHES = 3, 2, 24, 4  # the last is four times what the configuration says
RATES = [1e-3, 4e-3, 1e-2]
NAMED = ["nash-mhc", "dense", "dense-mhc", "dense-conv-mhc"]  # without being asked for others
COMPARED = NAMED[:2]  # each is two programs more to compile; how many there are is all the same to the comparison


def minute(**changes):
    sizes = {"data__batch_size": B, "train__total_steps": STEPS, "train__eval_batches": EVAL_BATCHES // 4}
    return dataclasses.replace(small.config(**sizes | changes), model=MINUTE)


@pytest.fixture(scope="module")
def compared():
    """One comparison of all variants: what went to the devices in each run, the steps that were compiled,
    what was said."""
    seen = SimpleNamespace(runs=[], trained=[], held_out=[], steps=[], said=io.StringIO())

    def begin(cfg, mesh):
        seen.runs.append((cfg, []))
        return created(cfg, mesh)

    def spy(patch, module, note):
        real = module.to_device
        patch.setattr(module, "to_device", lambda rows, mesh: note(rows) or real(rows, mesh))

    with pytest.MonkeyPatch.context() as patch, logs.showing(logging.StreamHandler(seen.said), "info"):
        spy(patch, device_batches, lambda rows: seen.trained.append(rows) or seen.runs[-1][1].append(rows))
        spy(patch, evaluate, seen.held_out.append)
        compiled, created = quality.compile_train_step, quality.create_state
        patch.setattr(quality, "compile_train_step", lambda *a, **k: seen.steps.append(compiled(*a, **k)) or seen.steps[-1])
        patch.setattr(quality, "create_state", begin)
        names, rates = ",".join(COMPARED), ",".join(map(str, reversed(RATES)))
        seen.figures = quality.bench_quality(minute(), variants=names, seeds=SEEDS, learning_rates=rates)
    return seen


def test_all_runs_of_a_seed_learn_from_the_same_rows_in_the_same_order(compared):
    first = {}
    for cfg, rows in compared.runs:
        assert len(rows) == cfg.train.total_steps
        want = first.setdefault(cfg.train.seed, rows)
        for got, other in zip(rows, want, strict=False):  # a run of fewer steps reads the first of them
            jax.tree.map(np.testing.assert_array_equal, got, other)
    assert set(first) == {0, 1}
    assert not np.array_equal(first[0][0].inputs, first[1][0].inputs)  # each seed has its own
    assert not np.array_equal(first[0][0].inputs, first[0][1].inputs)  # and so has each step


def test_every_rate_is_tried_with_the_first_seed_and_the_best_with_the_others(compared):
    per_variant = len(RATES) + SEEDS - 1
    for i, figures in enumerate(compared.figures["variants"].values()):
        tried = [(cfg.optim.learning_rate, cfg.train.seed) for cfg, _ in compared.runs[i * per_variant :][:per_variant]]
        assert tried == [(rate, 0) for rate in RATES] + [(figures["learning_rate"], 1)]
        losses = figures["rates"]
        assert list(losses) == [f"{rate:g}" for rate in RATES]
        assert losses[f"{figures['learning_rate']:g}"] == min(losses.values()) == figures["held_out"][0]
        assert len(set(losses.values())) == len(RATES)
        assert figures["at_edge"] == (figures["learning_rate"] != RATES[1])


def test_at_equal_seconds_each_makes_as_many_steps_as_it_can(compared):
    fastest = max(v["tokens_per_s"] for v in compared.figures["variants"].values())
    for v in compared.figures["variants"].values():
        raced = v["equal_seconds"]
        assert raced["steps"] == max(1, round(STEPS * v["tokens_per_s"] / fastest))
        # Fewer steps, on a machine that was busy perhaps a single one: between what all of them came to and guessing.
        assert v["held_out"][0] - 0.5 < raced["held_out"] < 1.1 * math.log(257)
        if raced["steps"] == STEPS:
            assert raced["held_out"] == v["held_out"][0]


def test_all_variants_are_scored_on_the_same_rows_and_places_add_up_to_them(compared):
    found = compared.held_out
    for i, rows in enumerate(found):
        np.testing.assert_array_equal(rows.inputs, found[i % EVAL_BATCHES].inputs)
    assert compared.figures["eval_rows"] == EVAL_BATCHES * B
    # After the rates come the places, one after the other: [0, 16) and [16, 32).
    passes = [found[i : i + EVAL_BATCHES] for i in range(0, len(found), EVAL_BATCHES)]
    first, second = passes[len(RATES) : len(RATES) + 2]
    for whole, a, b in zip(passes[0], first, second, strict=True):
        np.testing.assert_array_equal(whole.weights, a.weights + b.weights)
        assert not a.weights[..., 16:].any() and not b.weights[..., :16].any()
    weight = [sum(float(rows.weights.sum()) for rows in each) for each in (first, second)]
    for v in compared.figures["variants"].values():
        assert list(v["loss_by_position"]) == ["0 to 15", "16 to 31"]
        mean = np.average(list(v["loss_by_position"].values()), weights=weight)
        assert v["held_out"][0] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("kind", ["trained", "held_out"])
def test_rows_are_aligned_for_the_coarsest_model(compared, kind):
    segments = np.concatenate([r.segments.reshape(-1, 32) for r in getattr(compared, kind)])
    starts = np.nonzero(np.diff(segments, axis=1) > 0)[1] + 1
    assert starts.size  # documents do meet within rows, or the alignment would not show
    assert not np.any(starts % MINUTE.coarsest_stride)


def test_variants_differ_in_architecture_and_hardly_in_parameters(compared):
    parts = ("scales", "window", "conv_taps", "residual")
    found = {name: dataclasses.asdict(quality.variant(name, minute().model, 1)) for name in NAMED}
    assert {name: tuple(v[part] for part in parts) for name, v in found.items()} == {
        "nash-mhc": (2, 8, 2, "mhc-layer"),
        "dense": (1, None, 0, "plain"),
        "dense-mhc": (1, None, 0, "mhc-layer"),
        "dense-conv-mhc": (1, None, 2, "mhc-layer"),
    }
    assert found["nash-mhc"]["ffn"] == MINUTE.ffn
    for name, v in found.items():
        model = dataclasses.replace(MINUTE, **{key: v[key] for key in (*parts, "ffn")})
        assert count_parameters(model) == pytest.approx(count_parameters(MINUTE), rel=0.03)
        assert v["ffn"] % 8 == 0
        if told := compared.figures["variants"].get(name):
            assert {key: told[key] for key in (*parts, "ffn")} == {key: v[key] for key in (*parts, "ffn")}
            assert told["parameters"] == count_parameters(model)
    assert list(compared.figures["variants"]) == COMPARED


def test_a_variant_is_compiled_once_for_all_rates_seeds_and_lengths(compared):
    assert max(step.traces for step in compared.steps) <= 1


def test_the_scales_of_those_that_have_some_are_in_the_figures(compared):
    for v in compared.figures["variants"].values():
        if v["scales"] == 1:
            assert "scale_weight" not in v
        else:
            np.testing.assert_allclose(np.sum(v["scale_weight"], axis=1), 1.0, atol=1e-5)
            assert np.shape(v["scale_entropy"]) == (MINUTE.layers,)


def test_a_seed_gives_the_same_loss_again_by_itself(compared):
    """Also shows that the seed is not part of the step, which here is compiled for another one;
    73 rows are four batches."""
    first = compared.figures["variants"]["dense"]["held_out"]
    rate = compared.figures["variants"]["dense"]["learning_rate"]
    again = quality.bench_quality(minute(train__seed=1, optim__learning_rate=rate), variants="dense", seeds=1, eval_rows=73)
    assert again["variants"]["dense"]["held_out"] == first[1:]
    assert again["seeds"] == compared.figures["seeds"][1:] == [1]
    assert first[0] != first[1]
    assert again["nash_below_dense"] is None and "nash-mhc and dense" in again["verdict"]


def test_figures_of_the_comparison_follow_from_the_losses(compared):
    figures, dense = compared.figures, compared.figures["variants"]["dense"]["held_out"]
    for v in figures["variants"].values():
        losses = v["held_out"]
        assert v["mean"] == pytest.approx(statistics.fmean(losses))
        assert v["spread"] == max(losses) - min(losses) > 0
        assert v["minus_dense"] == [a - b for a, b in zip(losses, dense, strict=True)]
        assert v["tokens_per_s"] > 0
        assert v["compile_s"] > 0
        assert all(3 < loss < 8 for loss in losses)  # three steps from ln 257 = 5.5
    edges = [figures["variants"][name]["at_edge"] for name in ("nash-mhc", "dense")]
    below = max(figures["variants"]["nash-mhc"]["held_out"]) < min(dense)
    assert figures["nash_below_dense"] == (None if any(edges) else below)
    assert figures["floor_nats_per_token"] == pytest.approx(0.53, abs=0.01)
    said = compared.said.getvalue()
    for name in COMPARED:
        assert f"\n{name}: " in f"\n{said}"
        v = figures["variants"][name]
        assert f"{name}, rate {v['learning_rate']:g}, seed 1: held-out loss {v['held_out'][1]:.4f} after 3 steps" in said
    assert said.count("compiling ...") == len(COMPARED)


@pytest.mark.parametrize("name", ["dense", "dense-mhc"])
def test_the_ffn_width_is_the_closest_of_all(name, monkeypatch):
    count = functools.cache(count_parameters)  # tracing takes its time
    monkeypatch.setattr(quality, "count_parameters", count)
    model = dataclasses.replace(MINUTE, **quality.VARIANTS[name])
    counts = {ffn: count(dataclasses.replace(model, ffn=ffn)) for ffn in range(8, 201, 8)}
    for unit in (8, 24):
        for target in (0, counts[8] + 1, count(MINUTE), counts[104] + 300, counts[104] + 500, counts[120] + 1300):
            best = min(range(unit, 201, unit), key=lambda ffn: abs(counts[ffn] - target))
            assert quality.match_parameters(model, target, unit).ffn == best, (unit, target)


def test_the_ffn_width_divides_over_the_mesh():
    model = dataclasses.replace(MINUTE, width=48, layers=3, heads=6, kv_heads=6, ffn=480)
    assert quality.variant("nash-mhc", model, 3) == model
    models = {name: quality.variant(name, model, 3) for name in quality.VARIANTS}
    assert all(model.ffn % 24 == 0 for model in models.values())
    parts = {name: (m.scales, m.window, m.conv_taps, m.residual) for name, m in models.items()}
    assert parts["multiscale-plain"] == (2, 8, 2, "plain")
    assert parts["dense-conv"] == (1, None, 2, "plain")


def test_a_model_without_an_equal_relative_is_refused():
    model = dataclasses.replace(MINUTE, width=8, heads=1, kv_heads=1, head_dim=2, ffn=8, vocab_size=2)
    with pytest.raises(ConfigError, match=r"^variant dense-mhc: no FFN width gives [\d,]+ parameters within 3% \(the nearest"):
        quality.variant("dense-mhc", model, 1)


@pytest.mark.parametrize(
    ("nash", "dense", "below", "words"),
    [
        ([0.70, 0.72], [0.74, 0.73], True, ["Every seed", "0.7000 to 0.7200 against 0.7300 to 0.7400", "+0.0100", "2 of 2"]),
        ([0.70, 0.74], [0.75, 0.73], False, ["Not every seed", "margin -0.0100", "1 of 2, the means differ by -0.0200"]),
        ([0.70], [0.75], True, ["0.7000 against 0.7500", "one seed"]),
        ([0.70, None], [0.75, 0.76], None, ["a run diverged"]),
    ],
)
def test_the_verdict_says_what_the_seeds_say(nash, dense, below, words):
    found = {"nash-mhc": {"held_out": nash}, "dense": {"held_out": dense}}
    findings.compare(found)
    answer, text = findings.verdict(found, 0.5)
    assert answer is below
    for word in words:
        assert word in text
    assert below is None or ("floor of the stories is 0.5000" in text and " 1.4" in text)
    assert (found["nash-mhc"]["mean"] is None) == (None in nash)
    assert found["dense"]["spread"] == max(dense) - min(dense)


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch, messages):
    now = 0.0
    monkeypatch.setattr(quality, "time", SimpleNamespace(monotonic=lambda: now))
    progress = quality._Progress()
    for now in (1.0, 9.0, 11.0, 12.0, 20.0, 22.0):
        progress.now(f"at {now:.0f}")
    assert messages == ["at 11", "at 22"]


def run_command(monkeypatch, *argv):
    monkeypatch.setattr("sys.argv", ["bench", *argv])
    return one_line_errors(command.main)


def test_the_comparison_as_json_and_as_a_table(compared, monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(quality, "bench_quality", lambda cfg, **own: asked.append((cfg, own)) or compared.figures)
    file = tmp_path / "figures.json"
    assert run_command(monkeypatch, "quality", "--total-steps", "7", "--seeds", "5", "--eval-rows", "6", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == compared.figures
    assert run_command(monkeypatch, "quality", "--variants", "dense", "--json", str(file)) == 0
    assert json.loads(file.read_text()) == compared.figures
    assert [(cfg.train.total_steps, own["seeds"], own["eval_rows"]) for cfg, own in asked] == [(7, 5, 6), (300, 3, None)]
    assert asked[0][1]["variants"].split(",") == NAMED
    assert asked[1][1]["variants"] == "dense"
    table = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    columns = compared.figures["variants"].values()
    assert ["parameters", *(f"{v['parameters']:,}" for v in columns)] in cells
    assert ["held_out, seed 1", *(f"{v['held_out'][1]:.4f}" for v in columns)] in cells
    assert ["minus_dense, seed 0", *(f"{v['minus_dense'][0]:+.4f}" for v in columns)] in cells
    assert ["held_out, rate 0.004", *(f"{v['rates']['0.004']:.4f}" for v in columns)] in cells
    assert ["at equal seconds", *(f"{v['equal_seconds']['held_out']:.4f}" for v in columns)] in cells
    assert ["loss at 16 to 31", *(f"{v['loss_by_position']['16 to 31']:.4f}" for v in columns)] in cells
    labels = [row[0] for row in cells if not row[0].startswith(("held_out", "minus_dense", "loss at", "steps in"))]
    assert labels == [
        "parameters", "ffn", "best rate", "mean", "spread", "at equal seconds", "entropy of scales", "tokens_per_s",
        "compile_s",
    ]  # fmt: skip
    assert compared.figures["verdict"] in table
    edges = [v["at_edge"] for v in columns]
    assert ("(edge): the best rate is the lowest or the highest of those tried" in table) == any(edges)
    assert [row[1:] for row in cells if row[0] == "best rate"] == [
        [f"{v['learning_rate']:g}" + " (edge)" * v["at_edge"] for v in columns]
    ]


def test_the_best_rate_at_the_edge_is_no_verdict():
    found = {"nash-mhc": {"held_out": [0.7], "at_edge": False}, "dense": {"held_out": [0.8], "at_edge": True}}
    below, text = findings.verdict(found, None)
    assert below is None and "No verdict" in text and "dense" in text and "edge" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("quality --seeds 0", "--seeds and --eval-rows must be at least 1"),
        ("quality --seeds many", "--seeds: invalid int value: 'many'"),
        ("quality --eval-rows 0", "--seeds and --eval-rows must be at least 1"),
        ("quality --seed 4294967295 --seeds 2", "train.seed must be at most 4294967295, not 4294967296"),
        ("quality --variants nash-mhc,dens", "--variants: unknown variant 'dens'; did you mean dense?"),
        ("quality --variants ,", "--variants: unknown variant ''; choose from nash-mhc, dense, dense-mhc, dense-conv-mhc, "),
        (
            "quality --learning-rates 1e-3,fast",
            "--learning-rates 1e-3,fast must be comma-separated numbers",
        ),
        ("quality --learning-rates 1e-3,0", "--learning-rates 1e-3,0 must be comma-separated numbers above 0"),
        ("quality --task recall", "unknown flag --task: task was removed; bench quality compares on text"),
        ("quality --picture p.svg", "unknown flag --picture: picture was removed; --json FILE writes all figures"),
        ("quality --model-scales 1", "bench quality needs the full model: --model-scales above 1"),
        ("quality --model-residual plain", "bench quality needs the full model: --model-scales above 1"),
        ("quality --model-vocab-size 100", "--tokenizer bytes: set --model-vocab-size 257 or more"),
        ("quality --warmup 3 --seeds 0", "unknown flag --warmup; did you mean --warmup-steps?"),
        ("quality --json /nowhere/figures.json --seeds 0", "--json /nowhere/figures.json: cannot be written"),
        ("quality --init-from x", "--init-from"),
        ("data --megabytes 8", "bench data was removed"),
        ("step --objective distill", "--objective distill: `bench step`"),
        ("compile --seeds 3", "unknown flag --seeds; did you mean --seed?"),
        ("step --steps 0", "--steps must be at least 1"),
        ("qualty", "unknown benchmark 'qualty'; did you mean quality?; usage: python -m nash_mhc.bench step | parts |"),
        (
            "",
            "unknown benchmark ''; usage: python -m nash_mhc.bench step | parts | kernels | compile | quality | corpus "
            "[flags of train]",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv, message, monkeypatch, capsys):
    assert run_command(monkeypatch, *argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("name", ["step", "parts", "kernels", "compile"])
def test_a_named_model_is_the_one_that_is_timed(monkeypatch, capsys, tmp_path, name):
    described_run(tmp_path / "run", small.config())
    assert run_command(monkeypatch, name, "--init-from", str(tmp_path / "run"), "--print-config") == 0
    out = capsys.readouterr().out
    assert re.search(rf"width: 32 .*--init-from {tmp_path}", out) and "ffn: 64 " in out
    assert run_command(monkeypatch, name, "--profile-for", "tpu", "--print-config") == 0
    assert re.search(r"batch_size: 64 ", capsys.readouterr().out)


def test_help_names_the_benchmarks_and_each_its_own_flags(monkeypatch, capsys):
    assert run_command(monkeypatch, "--help") == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in command.ABOUT)
    with pytest.raises(SystemExit) as stopped:
        run_command(monkeypatch, "quality", "--help")
    flags = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(flag in flags for flag in ("--seeds", "--variants", "--eval-rows", "--json", "--total-steps"))
    assert "--topology" not in flags
