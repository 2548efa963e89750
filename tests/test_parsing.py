"""The command line: precedence, origins, the round trip through YAML, and one line for every mistake."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nash_mhc.config import commands, parsing, presets
from nash_mhc.config.key_names import FURTHER
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.train.inferred_settings import found_settings

# A value for every flag that must exist, different from what any preset would hold.
REQUIRED = {
    "--dataset": "corpus.txt", "--dataset-name": "v2", "--split": "part", "--tokenizer": "toks", "--batch-size": "7",
    "--seq-len": "320", "--total-steps": "777777", "--warmup-steps": "7", "--learning-rate": "7e-05", "--seed": "7",
    "--log-interval": "7", "--checkpoint-interval": "7", "--checkpoint-dir": "runs/seven", "--resume-from": "runs/six",
    "--num-workers": "7", "--worker-buffer-size": "7", "--mesh-data": "7", "--mesh-fsdp": "7", "--mesh-tp": "7",
    "--num-devices": "7", "--model-size": "small", "--platform": "cpu", "--grad-accum": "7", "--remat": "full",
    "--dtype": "bfloat16", "--eval-interval": "7", "--ema-decay": "0.77", "--max-grad-norm": "0.7",
    "--weight-decay": "0.07",
}  # fmt: skip


def leaf(config: RunConfig, path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def error(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsing.parse(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes run.yaml into the current folder, so that messages begin with a plain `run.yaml:`."""
    monkeypatch.chdir(tmp_path)

    def write_(text: str | bytes, name: str = "run.yaml") -> str:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write_


# --- every key, three ways ----------------------------------------------------------------------------------------


def a_value(key: parsing.Key) -> tuple[str, object]:
    """Some valid value of that key which no preset holds, as text and as the config should hold it."""
    current = leaf(presets.run(), key.path)
    if key.metadata["choices"]:
        other = next(c for c in key.metadata["choices"] if c != current)
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
        special |= {"model.nash_iterations": 7, "model.streams": 7, "model.conv_taps": 7, "model.full_every": 2}
        number = special.get(key.path, 97)
        return str(number), number
    special_text = {"telemetry.profile": "5:7", "model.rope_scaling": "linear,factor=2", "quantize.weights": "3/0,none"}
    special_text |= {"mesh.platform": "tpu,cpu", "train.remat_keep": "qkv,ffn-up"}
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
    needed |= {"data.prompt_template": both, "data.response_template": both}
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
    assert len([key for key in keys if key.section not in FURTHER]) < 90  # what pretraining has
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
        (["--total-steps", "123456789012345678901"], "train.total_steps", 123456789012345678901),
        (["--weight-decay", "0"], "optim.weight_decay", 0.0),
        (["--model-window", "None"], "model.window", None),
        (["model_window=64", "model.window=none"], "model.window", None),
        (["--remat", "none"], "train.remat", "none"),
        (["--model-size", "1b"], "train.kept", "dots+ffn-up"),
        (["--model-size", "1b", "--remat", "none"], "train.kept", "none"),  # what a preset keeps goes with its own remat
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


# --- render -------------------------------------------------------------------------------------------------------

ODD_TEXT = ["none", "None", "null", "~", "true", "12", "1e-3", " a ", "a # b", "a: b", "é😀", 'it\'s "q"', "- x"]
ODD_TEXT += ["a\nb", "\x07", "x" * 300 + " y" * 100]


@pytest.mark.parametrize("size", presets.sizes())
def test_round_trip_of_presets(size, write):
    parsed = parsing.parse(["--model-size", size, "--mesh-fsdp", "-1", "ema_decay=1e-7", "--print-config"])
    assert parsed.print_config
    again = parsing.parse(["--config", write(parsing.render(parsed.config, parsed.origins))])
    assert again.config == parsed.config
    assert again.origins["model_size"] == "run.yaml:1"


@pytest.mark.parametrize("way", [["--model-kind", "reservoir"], ["--model_kind=reservoir"], ["model_kind=reservoir"], None])
def test_a_kind_of_model_brings_its_own_keys_and_sizes(way, write):
    of_kind = way or ["--config", write("model_kind: reservoir\nmodel:\n  units: 99")]
    parsed = parsing.parse([*of_kind, "--model-size", "1b", "--model-units", "64", "--model-width", "32"])
    assert parsed.config.model == dataclasses.replace(presets.run("1b", "reservoir").model, units=64, width=32)
    assert parsed.config.model_kind == "reservoir"
    again = parsing.parse(["--config", write(parsing.render(parsed.config, parsed.origins))])
    assert again.config == parsed.config
    assert RunConfig.from_dict(json.loads(json.dumps(parsed.config.to_dict()))) == parsed.config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model-units", "3"], "unknown flag --model-units: {}"),
        (["model.units=3"], "override model.units=3: unknown key model.units: {}"),
        (["--config", "{}"], "run.yaml:2: unknown key model.units: {}"),
    ],
)
def test_a_key_of_another_kind_says_whose_it_is(argv, message, write):
    argv = [write("model:\n  units: 3") if word == "{}" else word for word in argv]
    assert error(*argv) == message.format("model.units is a key of --model-kind reservoir, and this is nash-mhc")


def test_a_profile_of_a_device_lies_above_the_preset_and_below_the_user(write):
    parse = lambda *argv: parsing.parse(["--profile-for", "tpu", *argv], found=found_settings)
    parsed = parse("--model-size", "small")
    assert (parsed.config.data.batch_size, parsed.config.optim.learning_rate) == (64, 8.49e-3)
    assert parsed.origins["data.batch_size"] == "--profile-for tpu"
    assert parse("--batch-size", "3").config.data.batch_size == 3
    assert parse("learning_rate=1e-3").config.optim.learning_rate == 1e-3
    again = parsing.parse(["--config", write(parsing.render(presets.run(), {}))])
    assert again.config.mesh.profile_for is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["device_type=tpu"], "override device_type=tpu: unknown key device_type; did you mean mesh.platform?"),
        (
            ["global_batch_size=8"],
            "override global_batch_size=8: unknown key global_batch_size; did you mean data.batch_size?",
        ),
        (
            ["--model-kind", "recursive", "arch.H_cycles=3"],
            "override arch.H_cycles=3: unknown key arch.H_cycles; did you mean model.outer_cycles?",
        ),
        (
            ["arch.H_cycles=3"],
            "override arch.H_cycles=3: unknown key arch.H_cycles: model.outer_cycles is a key of --model-kind recursive, and "
            "this is nash-mhc",
        ),
    ],
)
def test_what_other_projects_call_a_key_leads_to_ours(argv, message):
    assert error(*argv) == message


@pytest.mark.parametrize("text", ODD_TEXT)
def test_round_trip_of_odd_text(text, write):
    base = presets.run()
    data = dataclasses.replace(base.data, dataset_name=text, dataset=text)
    config = dataclasses.replace(base, data=data)
    rendered = parsing.render(config, {"data.dataset": f"override dataset={text}"})
    assert parsing.parse(["--config", write(rendered)]).config == config
    assert len(rendered.splitlines()) == len(parsing.render(base, {}).splitlines())


def test_render_is_plain_yaml_with_aligned_origins():
    parsed = parsing.parse(["--batch-size", "9", "optim.eps=1e-9"])
    rendered = parsing.render(parsed.config, parsed.origins)
    assert yaml.safe_load(rendered) == parsed.config.to_dict()
    lines = rendered.splitlines()
    origins = [line.split(" # ")[1] for line in lines if not line.endswith(":")]
    assert origins == [parsed.origins[key.path] for key in parsing.keys().values()]
    assert len({line.index(" # ") for line in lines if not line.endswith(":")}) == 1
    assert next(line for line in lines if "batch_size:" in line).endswith("# flag --batch-size")


# --- mistakes on the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset", "a:0.7", "--dataset", "b"], "--dataset was given twice; a mixture's have weights: --dataset b:0.5"),
        (
            ["--dataset", "hf:x", "--dataset", "a:0.7"],
            "--dataset was given twice; a mixture's have weights: --dataset hf:x:0.5",
        ),
        (["--batchsize", "8"], "unknown flag --batchsize; did you mean --batch-size?"),
        (["--batch_sise=8"], "unknown flag --batch_sise; did you mean --batch-size?"),
        (["--data.batch_size=8"], "unknown flag --data.batch_size; did you mean --batch-size?"),
        (["--batch", "8"], "unknown flag --batch; did you mean --batch-size?"),
        (["--heads", "8"], "unknown flag --heads; did you mean --model-heads?"),
        (["--lr", "8"], "unknown flag --lr; did you mean --learning-rate?"),
        (["--no-batch-size"], "unknown flag --no-batch-size; did you mean --batch-size?"),
        (["--print-confg"], "unknown flag --print-confg; did you mean --print-config?"),
        (["--qqqq"], "unknown flag --qqqq; --help lists them all"),
        (["-x"], "unknown flag -x; --help lists them all"),
        (["--"], "unknown flag --; --help lists them all"),
        (["--batch-size"], "--batch-size needs a value"),
        (["--batch-size="], "--batch-size needs a value"),
        (["--batch-size", "--seed", "3"], "--batch-size needs a value"),
        (["--dataset", "-x"], "--dataset needs a value"),
        (["batch_size="], "override batch_size=: data.batch_size needs a value"),
        (["--config"], "--config needs a value, the name of a YAML file"),
        (["--config", "--seed"], "--config needs a value, the name of a YAML file"),
        (["--use-small-model=true"], "--use-small-model takes no value; leave out '=true'"),
        (["--print-config=yes"], "--print-config takes no value; leave out '=yes'"),
        (["--no-model-qk-norm=true"], "--no-model-qk-norm takes no value; leave out '=true'"),
        (["stories"], "unexpected argument 'stories'; write --flag value or section.key=value"),
        (["=3"], "unexpected argument '=3'; write --flag value or section.key=value"),
        (["--batch-size", "eight"], "--batch-size must be an integer, not 'eight'"),
        (["--batch-size", "1.5"], "--batch-size must be an integer, not '1.5'"),
        (["--batch-size", "1e400"], "--batch-size must be an integer, not '1e400'"),
        (["--batch-size", "none"], "--batch-size must be an integer, not 'none'"),
        (["--model-window", "x"], "--model-window must be an integer or none, not 'x'"),
        (["--learning-rate", "fast"], "--learning-rate must be a number, not 'fast'"),
        (["--learning-rate", "nan"], "--learning-rate must be a finite number, not nan"),
        (["--learning-rate", "-inf"], "--learning-rate must be a finite number, not -inf"),
        (["--model-qk-norm=maybe"], "--model-qk-norm must be true or false, not 'maybe'"),
        (["--dataset", "null"], "--dataset must be text, not None"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--learning-rate", "-1"], "--learning-rate must be above 0, not -1.0"),
        (["data.batch_size=0"], "override data.batch_size=0: data.batch_size must be at least 1, not 0"),
        (["ema_decay=2"], "override ema_decay=2: optim.ema_decay must be at most 0.999999, not 2.0"),
        (["--remat", "ful"], "--remat must be one of none, dots, full, not 'ful'; did you mean full?"),
        (["--remat", "DOTS"], "--remat must be one of none, dots, full, not 'DOTS'; did you mean dots?"),
        (["--model-scales", "9"], "--model-scales must be at most 8, not 9"),
        (["--model-ratio", "1"], "--model-ratio must be at least 2, not 1"),
        (["--model-streams", "1"], "--model-streams must be at least 2, not 1"),
        (
            ["--model-aggregation", "nsh"],
            "--model-aggregation must be one of nash, convex, mean, not 'nsh'; did you mean nash?",
        ),
        (["--model-residual", "hc"], "--model-residual must be one of mhc, mhc-layer, plain, not 'hc'; did you mean mhc?"),
        (["sparsity=-1"], "override sparsity=-1: optim.sparsity must be at least 0, not -1.0"),
        (["batchsize=8"], "override batchsize=8: unknown key batchsize; did you mean batch_size?"),
        (["data.batchsize=8"], "override data.batchsize=8: unknown key data.batchsize; did you mean data.batch_size?"),
        (["optim.seq_len=8"], "override optim.seq_len=8: unknown key optim.seq_len; did you mean data.seq_len?"),
        (["heads=8"], "override heads=8: unknown key heads; did you mean model.heads?"),
        (["qqqq=8"], "override qqqq=8: unknown key qqqq; --help lists them all"),
        (["--config", "no/such.yaml"], "--config cannot read no/such.yaml: No such file or directory"),
    ],
)
def test_mistakes(argv, message):
    assert error(*argv) == message


@pytest.mark.parametrize("way", [["--model-size", "smal"], ["model_size=smal"]])
def test_unknown_size(way):
    message = error(*way)
    assert "must be one of" in message and all(size in message for size in presets.sizes())
    assert message.endswith("not 'smal'; did you mean small?")


def test_a_check_of_a_whole_section_names_the_origin():
    message = error("--mesh-data", "0")
    assert message.startswith("mesh.data must be a positive number of devices or -1 for the rest, not 0")
    assert message.endswith(" (mesh.data from flag --mesh-data)")


def test_groups_of_layers_divide_them():
    assert error("--model-full-every", "3", "--model-layers", "8").startswith(
        "model.full_every 3 does not divide model.layers 8; the nearest that does is 2"
    )
    assert "set model.window, or leave it at 0" in error("--model-full-every", "2", "--model-window", "none")


def test_keys_that_do_not_fit_together_name_both_origins(write):
    file = write("model:\n  heads: 9\n")
    message = error("--config", file, "--model-kv-heads", "4")
    assert "model.kv_heads 4 does not divide model.heads 9; the nearest that does is 3" in message
    assert "model.heads from run.yaml:2" in message and "model.kv_heads from flag --model-kv-heads" in message


@pytest.mark.parametrize(
    ("flag", "value", "nearest"), [("--model-window", 100, 96), ("--seq-len", 61, 64), ("--model-window", 3, 8)]
)
def test_what_is_no_multiple_of_the_coarsest_stride_is_told_the_nearest_that_is(flag, value, nearest):
    path = next(k.path for k in parsing.keys().values() if k.flag == flag)
    shape = ["model.ratio=2", "--model-scales", "4"]
    message = error(*shape, flag, str(value))
    assert message.startswith(f"{path} {value} must be a multiple of the coarsest stride 8 (model.ratio 2, model.scales 4); ")
    assert f"the nearest is {nearest} (" in message
    assert "model.scales from flag --model-scales" in message and f"{path} from flag {flag}" in message
    assert leaf(parsing.parse([*shape, flag, str(nearest)]).config, path) == nearest


# --- mistakes in a file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_len: 3", "run.yaml:1: seq_len belongs under data:"),
        ("data.seq_len: 3", "run.yaml:1: seq_len belongs under data:"),
        ("data:\n  learning_rate: 3", "run.yaml:2: learning_rate belongs under optim:"),
        ("data:\n  model_size: tiny", "run.yaml:2: model_size belongs at the top of the file, not under data:"),
        ("data:\n\n  seqlen: 3", "run.yaml:3: unknown key data.seqlen; did you mean seq_len?"),
        ("data:\n  lerning_rate: 3", "run.yaml:2: unknown key data.lerning_rate; did you mean optim.learning_rate?"),
        ("mesh:\n  mesh_data: 3", "run.yaml:2: unknown key mesh.mesh_data; did you mean data?"),
        ("dta:\n  seq_len: 3", "run.yaml:1: unknown key dta; did you mean data?"),
        (
            "[a]: 3",
            "run.yaml:1: unknown key [...]; there are model, data, mesh, optim, train, objective, lora, distill, quantize, "
            "precision, telemetry, model_size, model_kind",
        ),
        ("data:\n  split: a\n  split: b", "run.yaml:3: data.split is set twice, first on line 2; keep one of them"),
        ("data: {}\ntrain: {}\ndata: {}", "run.yaml:3: data is set twice, first on line 1; keep one of them"),
        ("data: 3", "run.yaml:1: data must hold lines of the form 'key: value'"),
        ("- data", "run.yaml:1: the file must hold lines of the form 'key: value'"),
        ("data:\n  seq_len: [3]", "run.yaml:2: data.seq_len takes a single value, not a list or a section"),
        ("data:\n  seq_len: {a: 3}", "run.yaml:2: data.seq_len takes a single value, not a list or a section"),
        ("model_size: {a: 3}", "run.yaml:1: model_size takes a single value, not a list or a section"),
        ("data:\n  seq_len:", "run.yaml:2: data.seq_len needs a value"),
        ("data:\n  dataset: ''", "run.yaml:2: data.dataset needs a value"),
        ("data:\n  dataset: null", "run.yaml:2: data.dataset must be text, not None"),
        ("data:\n  seq_len: long", "run.yaml:2: data.seq_len must be an integer, not 'long'"),
        ("data:\n  seq_len: 1.5", "run.yaml:2: data.seq_len must be an integer, not '1.5'"),
        ("data:\n  seq_len: true", "run.yaml:2: data.seq_len must be an integer, not 'true'"),
        ("data:\n  seq_len: 1", "run.yaml:2: data.seq_len must be at least 2, not 1"),
        (
            "train:\n  remat: ful",
            "run.yaml:2: train.remat must be one of none, dots, full, not 'ful'; did you mean full?",
        ),
        ("a: [", "run.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("data:\n  a: b: c", "run.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("data:\n\tseq_len: 3", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("[" * 5000, "run.yaml: not valid YAML: nested too deeply"),
        ("a: \x07", "run.yaml: not valid YAML: special characters are not allowed"),
        (b"\xff\xfe\x00", "--config cannot read run.yaml: it is not UTF-8 text"),
    ],
)
def test_mistakes_in_yaml(text, message, write):
    assert error("--config", write(text)) == message


def test_a_folder_is_no_config_file(tmp_path):
    assert error("--config", str(tmp_path)) == f"--config cannot read {tmp_path}: Is a directory"


# --- help, own flags, exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as caught:
        parsing.parse(["--batchsize", "-h"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m nash_mhc.train ")
    assert out.count("\n  python -m nash_mhc.train ") == 3, "three examples"
    assert max(map(len, out.splitlines())) <= (100 if columns == "200" else 80)
    words = set(out.replace(",", " ").split())
    shown = [k for k in parsing.keys().values() if k.section not in FURTHER]
    flags = {k.flag for k in shown} | set(REQUIRED)
    assert flags | {"--config", "--print-config", "--help", "-h", "--use-small-model"} <= words
    flat = " ".join(out.split())
    for key in shown:
        assert key.metadata["help"] in flat
        assert all(choice in flat for choice in key.metadata["choices"] or ())
    assert f"{parsing.keys()['data.batch_size'].metadata['help']} [{presets.run().data.batch_size}]" in flat
    for section in ("data", "train", "optim", "mesh", "model"):
        assert f" ({section}.*):\n" in out


def test_help_of_a_section(capsys):
    with pytest.raises(SystemExit):
        parsing.parse(["--help"])
    whole = capsys.readouterr().out
    for section in {*parsing.sections(), *FURTHER}:
        with pytest.raises(SystemExit) as caught:
            parsing.parse(["--help", section])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        mine = [key for key in parsing.keys().values() if key.section == section]
        assert mine and all(f"  {key.flag} " in out for key in mine)
        assert out.count("\n  --") == len(mine)
        assert (f"--help {section} " in whole) == (section in FURTHER) == (f" ({section}.*):" not in whole)
    with pytest.raises(ConfigError, match=r"^--help optm: no such section; did you mean optim\?$"):
        parsing.parse(["--help", "optm"])


def own(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--iters", type=int, default=3, help="timed steps")
    group.add_argument("--quick", action="store_true")


def test_own_flags_of_a_command(capsys):
    argv = ["--mesh-data", "-1", "--iters", "5", "dataset=a b", "--seed=2", "--quick", "--seed", "4"]
    parsed = parsing.parse(argv, own=own)
    assert vars(parsed.own) == {"iters": 5, "quick": True}
    config = parsed.config
    assert (config.mesh.data, config.data.dataset, config.train.seed) == (-1, "a b", 4)
    assert parsing.parse([], own=own).own.iters == 3
    for argv, message in [
        (["--iters", "x"], "--iters: invalid int value: 'x'"),
        (["--iters"], "--iters: expected one argument"),
        (["--iter", "3"], "unknown flag --iter; did you mean --iters?"),
        (["--batchsize", "3"], "unknown flag --batchsize; did you mean --batch-size?"),
    ]:
        with pytest.raises(ConfigError) as caught:
            parsing.parse(argv, own=own)
        assert str(caught.value) == message
    with pytest.raises(SystemExit):
        parsing.parse(["--help"], own=own)
    out = capsys.readouterr().out
    assert "timed steps" in out and "--batch-size" in out and out.count("usage:") == 1


def test_one_line_errors(capsys):
    def mistake() -> int:
        raise ConfigError("two\nlines")

    def interrupted() -> int:
        raise KeyboardInterrupt

    def broken() -> int:
        raise ZeroDivisionError

    assert commands.one_line_errors(lambda: 0) == 0
    assert commands.one_line_errors(lambda: 3) == 3
    assert commands.one_line_errors(mistake) == 2
    assert capsys.readouterr() == ("", "error: two lines\n")
    assert commands.one_line_errors(interrupted) == 130
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        commands.one_line_errors(broken)


def test_the_folder_of_a_run_needs_no_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    parse = lambda *argv: parsing.parse(argv, folder="train.checkpoint_dir")
    for name in ("runs/notes", "./notes", "gs://bucket/run", "there"):
        assert parse("--seed", "1", name).config == parsing.parse(["--checkpoint-dir", name, "--seed", "1"]).config
    assert parse("runs/notes").origins["train.checkpoint_dir"] == "argument runs/notes"
    for two in (["runs/a", "runs/b"], ["--checkpoint-dir", "runs/a", "runs/b"], ["runs/b", "--checkpoint-dir", "runs/a"]):
        with pytest.raises(ConfigError, match="two folders are given, runs/a and runs/b; name one"):
            parse(*two)
    (tmp_path / "run.yaml").write_text("train:\n  checkpoint_dir: null\n")  # as --print-config writes it
    for argv in (["runs/a", "--config", "run.yaml"], ["--config", "run.yaml", "runs/a"]):
        assert parse(*argv).config.train.checkpoint_dir == "runs/a"
    (tmp_path / "there" / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="there: is there and holds no run; give a new folder, or --dataset there"):
        parse("there")
    (tmp_path / "there" / "run.json").write_text("{}")
    assert parse("there").config.train.checkpoint_dir == "there"
    with pytest.raises(
        ConfigError, match=r"unexpected argument 'smal'; .*; the folder of a run has a slash in its name: runs/smal"
    ):
        parse("smal")  # a typo begins no run
    with pytest.raises(ConfigError, match=r"unexpected argument 'runs/notes'; write --flag value or section.key=value$"):
        parsing.parse(["runs/notes"])  # of a command that has no run's folder


@pytest.mark.parametrize("command", ["bench step", "bench quality", "data prepare", "data train-bpe"])
def test_every_command_with_keys_shows_its_configuration_and_stops(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, name = command.split()
    main = importlib.import_module(f"nash_mhc.{package}.__main__").main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [package, name, "--batch-size", "3", "--print-config"])
    assert main() == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["batch_size"] == 3
    assert not list(tmp_path.iterdir())


def test_steps_that_are_typed_go_before_epochs_in_a_file(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train:\n  epochs: 3\noptim:\n  warmup_steps: 2\n")
    recipe = ["--config", str(tmp_path / "recipe.yaml")]
    parsed = parsing.parse([*recipe, "--total-steps", "40"])
    assert (parsed.config.train.epochs, parsed.config.train.total_steps) == (None, 40)
    assert parsed.given["train.epochs"] is None
    assert parsing.parse(recipe).config.train.epochs == 3
    (tmp_path / "steps.yaml").write_text("train:\n  total_steps: 40\n")
    assert parsing.parse(["--config", str(tmp_path / "steps.yaml"), "--epochs", "2"]).config.train.epochs == 2
    with pytest.raises(ConfigError, match=r"^--epochs 2 and --total-steps 40 both say how long the run is; leave one out$"):
        parsing.parse(["--epochs", "2", "--total-steps", "40"])


def test_a_model_to_start_from_that_is_not_there_is_said_before_anything_else(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--init-from \S+Qwen: no such folder; give that of a run, or of a Hugging Face model"
    ):
        parsing.parse(["--init-from", str(tmp_path / "Qwen")], found=found_settings)
