"""The command line: every key by all of its names, what a value may be, precedence and origins."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from settings import REQUIRED, error, leaf

from nash_mhc.config import kits, parsing, presets
from nash_mhc.config.keys import further

# --- every key, three ways ----------------------------------------------------------------------------------------

A_KIT = str(Path(kits.__file__).parents[1] / "kits" / "recursive")


def a_value(key: parsing.Key) -> tuple[str, object]:
    """Some valid value of that key which no preset holds, as text and as the config should hold it."""
    current = leaf(presets.run(), key.path)
    if key.metadata["choices"]:
        other = next((c for c in key.metadata["choices"] if c != current), current)  # one choice, until more are registered
        return other, other
    if bool in key.kinds:
        return str(not current), not current
    if float in key.kinds:
        return "0.625", 0.625
    if int in key.kinds:
        # Divisors, even numbers and multiples of the coarsest stride keep the rules between keys;
        # other keys just take it.
        special = {"model.heads": 96, "model.kv_heads": 1, "model.head_dim": 34, "optim.warmup_steps": 3}
        special |= {"model.scales": 2, "model.ratio": 2, "model.window": 320, "data.seq_len": 320}
        special |= {
            "model.nash_iterations": 7,
            "model.streams": 7,
            "model.conv_taps": 7,
            "model.full_every": 2,
            "model.value_embeddings": 2,
        }
        number = special.get(key.path, 97)
        return str(number), number
    special_text = {"telemetry.profile": "5:7", "model.rope_scaling": "linear,factor=2", "quantize.weights": "3/0,none"}
    special_text |= {"mesh.platform": "tpu,cpu", "train.remat_keep": "qkv,ffn-up", "kit": A_KIT, "model.pattern": "full*2"}
    special_text |= {"optim.rate_factors": "matrix=2"}
    text = special_text.get(key.path, "some text")
    return text, text


@pytest.mark.parametrize("path", list(parsing.keys()))
def test_every_key_by_flag_path_short_form_and_yaml(path, write):
    key = parsing.keys()[path]
    text, expected = a_value(key)
    section, _, name = path.rpartition(".")
    file = write(f"{section}:\n  {name}: {text}\n" if section else f"{name}: {text}\n")
    ways = [[key.flag, text], [f"{key.flag}={text}"], [f"{path}={text}"], [f"{key.short}={text}"], ["--config", file]]
    both = ["--format", "fields", "--prompt-template", "{q}", "--response-template", "{a}"]  # neither without the other
    needed = {"train.init_step": ["--init-from", "runs/base"], "train.remat_keep": ["--remat", "dots"]}
    needed |= {"data.prompt_template": both, "data.response_template": both, "model.mixer": ["--model-scales", "1"]}
    needed |= {"optim.rate_factors": ["--optimizer", "normuon"]}
    needed |= {f"distill.{name}": ["--objective", "distill"] for name in ("teacher", "layers", "anchor")}
    for argv in ways:
        parsed = parsing.parse([*needed.get(path, []), *argv])
        assert leaf(parsed.config, path) == expected, argv
        assert type(leaf(parsed.config, path)) is type(expected)


@pytest.mark.parametrize("flag", list(REQUIRED))
def test_required_flags(flag):
    parsed = parsing.parse([flag, REQUIRED[flag]])
    path = next(k.path for k in parsing.keys().values() if k.flag == flag)
    assert str(leaf(parsed.config, path)) == REQUIRED[flag]
    assert parsed.origins[path] == f"flag {flag}"


def test_names_are_unambiguous_and_few():
    keys = list(parsing.keys().values())
    assert len([key for key in keys if key.section not in further()]) < 90  # what pretraining has
    for attribute in ("flag", "short", "path"):
        assert len({getattr(k, attribute) for k in keys}) == len(keys)
    assert {"--num-devices", "--platform", "--mesh-tp", "--model-qk-norm", "--model-size"} <= {k.flag for k in keys}


def test_no_jax_is_imported():
    code = "import sys, nash_mhc.config.parsing as c; c.parse([]); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(parsing.__file__).parents[2]).returncode == 0


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--mesh-data", "-1"], "mesh.data", -1),
        (["--total-steps", "1_000"], "train.total_steps", 1000),
        (["--total-steps", "1e4"], "train.total_steps", 10_000),
        (["--total-steps", "1234567890123456789"], "train.total_steps", 1234567890123456789),
        (["--weight-decay", "0"], "optim.weight_decay", 0.0),
        (["--model-window", "None"], "model.window", None),
        (["model_window=64", "model.window=none"], "model.window", None),
        (["--remat", "none"], "train.remat", "none"),
        (["--model-size", "1b", "--remat", "full", "--remat-keep", "read"], "train.kept", "full+read"),
        (["--dataset", "none"], "data.dataset", "none"),
        (["--model-qk-norm"], "model.qk_norm", True),
        (["--no-model-qk-norm"], "model.qk_norm", False),
        (["--model-qk-norm=false"], "model.qk_norm", False),
        (["--model-qk-norm", "false"], "model.qk_norm", False),
        (["--model-qk-norm", "seed=3"], "train.seed", 3),
        (["--dataset=a=b"], "data.dataset", "a=b"),
        (["--dataset=-x"], "data.dataset", "-x"),
        (["dataset=a=b c"], "data.dataset", "a=b c"),
        (["--use-small-model"], "model_size", "small"),
        (["--dataset", "a:0.7", "--dataset=b/*.txt:.3"], "data.dataset", "a:0.7,b/*.txt:.3"),
        (["--dataset", "a:0.7", "--dataset", "b:1", "--dataset", "hf:x/y:2"], "data.dataset", "a:0.7,b:1,hf:x/y:2"),
        (["--dataset", "a", "--dataset", "a"], "data.dataset", "a"),
        (["--dataset", "a:0.7", "dataset=b:0.3"], "data.dataset", "b:0.3"),
    ],
)
def test_values(argv, path, value):
    got = leaf(parsing.parse(argv).config, path)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("optim: {learning_rate: 1e-3}", "optim.learning_rate", 1e-3),
        ("optim: {learning_rate: 2}", "optim.learning_rate", 2.0),
        ("train: {total_steps: 1e4}", "train.total_steps", 10_000),
        ("train: {total_steps: 1_000}", "train.total_steps", 1000),
        ("model: {window: null}", "model.window", None),
        ("model: {window: none}", "model.window", None),
        ("data: {dataset_name: 'none'}", "data.dataset_name", "none"),
        ("data: {dataset_name: ~}", "data.dataset_name", None),
        ("data: {dataset: 2024}", "data.dataset", "2024"),
        ("model: {qk_norm: no}", "model.qk_norm", False),
        ("train: {remat: none}", "train.remat", "none"),
        ("\ufeffmodel_size: small", "model_size", "small"),
    ],
)
def test_yaml_values(text, path, value, write):
    got = leaf(parsing.parse(["--config", write(text)]).config, path)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "data:\n", "data:\n  # batch_size: 3\ntrain: {}\n"])
def test_yaml_that_sets_nothing(text, write):
    assert parsing.parse(["--config", write(text)]).config == presets.run()


# --- precedence and origins ---------------------------------------------------------------------------------------


def test_nothing_given_is_the_default_preset():
    parsed = parsing.parse([])
    assert parsed.config == presets.run()
    assert not parsed.print_config
    assert set(parsed.origins) == set(parsing.keys())
    assert parsed.origins["model_size"] == "default"
    assert parsed.origins["data.batch_size"] == f"preset {parsed.config.model_size}"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_last_setting_wins_in_every_order(order, write):
    file = write("train:\n  log_interval: 5\n\ndata:\n  batch_size: 30\n")
    other = write("data: {batch_size: 40}\n", "other.yaml")
    ways = [
        (["--batch-size", "10"], 10, "flag --batch-size"),
        (["data.batch_size=20"], 20, "override data.batch_size=20"),
        (["--config", file], 30, "run.yaml:5"),
        ([f"--config={other}"], 40, "other.yaml:1"),
    ]
    parsed = parsing.parse([token for i in order for token in ways[i][0]])
    _, value, origin = ways[order[-1]]
    assert parsed.config.data.batch_size == value
    assert parsed.origins["data.batch_size"] == origin
    assert parsed.origins["train.log_interval"] == "run.yaml:2"


@pytest.mark.parametrize("size", presets.sizes())
@pytest.mark.parametrize("way", ["flag", "override", "yaml"])
def test_the_preset_lies_below_everything(size, way, write):
    given = {"flag": ["--model-size", size], "override": [f"model_size={size}"], "yaml": ["--config", "run.yaml"]}[way]
    write(f"model_size: {size}\n")
    # The size is named last, yet what stands before it still holds.
    parsed = parsing.parse(["--batch-size", "3", "--model-size", presets.sizes()[-1], *given])
    base = presets.run(size)
    assert parsed.config == dataclasses.replace(base, data=dataclasses.replace(base.data, batch_size=3))
    assert parsed.origins["model.width"] == f"preset {size}"
    assert parsed.origins["model_size"] == {"flag": "flag --model-size", "override": f"override model_size={size}"}.get(
        way, "run.yaml:1"
    )


def test_use_small_model_takes_its_turn():
    other = next(size for size in presets.sizes() if size != "small")
    assert parsing.parse(["--model-size", other, "--use-small-model"]).config == presets.run("small")
    assert parsing.parse(["--use-small-model", "--model-size", other]).config == presets.run(other)
    assert parsing.parse(["--use-small-model"]).origins["model_size"] == "flag --use-small-model"


@pytest.mark.parametrize("size", presets.sizes())
def test_a_preset_warm_up_shrinks_to_fit_a_short_run(size):
    warmup = presets.run(size).optim.warmup_steps
    assert warmup > 1, "the presets have a warm-up to shrink"
    parsed = parsing.parse(["--model-size", size, "--total-steps", str(warmup - 1)])
    assert parsed.config.optim.warmup_steps <= (warmup - 1) / 10
    assert parsed.origins["optim.warmup_steps"] == f"preset {size}, fitted to total_steps"
    long = parsing.parse(["--model-size", size, "--total-steps", str(10 * warmup)])
    assert long.config.optim.warmup_steps == warmup
    assert long.origins["optim.warmup_steps"] == f"preset {size}"


def test_a_warm_up_of_the_user_is_never_changed():
    message = error("--total-steps", "5", "warmup_steps=6")
    assert "optim.warmup_steps 6 is more than train.total_steps 5" in message
    assert "optim.warmup_steps from override warmup_steps=6" in message
    assert "train.total_steps from flag --total-steps" in message
    parsed = parsing.parse(["--total-steps", "5", "--warmup-steps", "5"])
    assert (parsed.config.optim.warmup_steps, parsed.origins["optim.warmup_steps"]) == (5, "flag --warmup-steps")
