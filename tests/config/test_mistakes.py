"""Every mistake on the command line and in a file is one line: what, where, the remedy."""

from __future__ import annotations

import pytest
from settings import error, leaf

from nash_mhc.config import parsing, presets
from nash_mhc.config.schema import ConfigError, RunConfig

# --- mistakes on the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset", "a:0.7", "--dataset", "b"], "--dataset was given twice; a mixture needs weights: --dataset b:0.5"),
        (
            ["--dataset", "hf:x", "--dataset", "a:0.7"],
            "--dataset was given twice; a mixture needs weights: --dataset hf:x:0.5",
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
        (["--remat", "ful"], "--remat must be one of auto, none, dots, full, not 'ful'; did you mean full?"),
        (["--remat", "DOTS"], "--remat must be one of auto, none, dots, full, not 'DOTS'; did you mean dots?"),
        (["--model-scales", "9"], "--model-scales must be at most 8, not 9"),
        (["--model-ratio", "1"], "--model-ratio must be at least 2, not 1"),
        (["--model-streams", "1"], "--model-streams must be at least 2, not 1"),
        (
            ["--model-aggregation", "nsh"],
            "--model-aggregation must be one of nash, convex, mean, not 'nsh'; did you mean nash?",
        ),
        (["--model-residual", "hc"], "--model-residual must be one of mhc, mhc-layer, plain, not 'hc'; did you mean mhc?"),
        (
            ["--lora-targets", "all,,mlp"],
            "--lora-targets all,,mlp: contains an empty name; separate names with single commas",
        ),
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
    assert message.startswith("mesh.data must be a positive number of devices, or -1 for all remaining ones, not 0")
    assert message.endswith(" (mesh.data from flag --mesh-data)")


def test_groups_of_layers_divide_them():
    assert error("--model-full-every", "3", "--model-layers", "8").startswith(
        "model.full_every 3 does not divide model.layers 8; the nearest that does is 2"
    )
    assert "; set model.window, or full_every 0" in error("--model-full-every", "2", "--model-window", "none")


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
            "run.yaml:1: unknown key [...]; choose from model, data, mesh, optim, train, objective, lora, "
            "precision, telemetry, distill, quantize, model_size, model_kind, kit",
        ),
        ("data:\n  split: a\n  split: b", "run.yaml:3: data.split is set twice, first on line 2; keep one of them"),
        ("data: {}\ntrain: {}\ndata: {}", "run.yaml:3: data is set twice, first on line 1; keep one of them"),
        ("data: 3", "run.yaml:1: data must contain lines of the form 'key: value'"),
        ("- data", "run.yaml:1: the file must contain lines of the form 'key: value'"),
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
            "run.yaml:2: train.remat must be one of auto, none, dots, full, not 'ful'; did you mean full?",
        ),
        ("a: [", "run.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("data:\n  a: b: c", "run.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("data:\n\tseq_len: 3", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("[" * 600, "run.yaml: not valid YAML: nested too deeply"),
        ("a: \x07", "run.yaml: not valid YAML: special characters are not allowed"),
        (b"\xff\xfe\x00", "--config cannot read run.yaml: it is not UTF-8 text"),
    ],
)
def test_mistakes_in_yaml(text, message, write):
    assert error("--config", write(text)) == message


def test_a_folder_is_no_config_file(tmp_path):
    assert error("--config", str(tmp_path)) == f"--config cannot read {tmp_path}: Is a directory"


# --- keys of earlier versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [["--model-sinkhorn-iterations", "20"], ["model.sinkhorn_iterations=20"], ["--config", "run.yaml"]], ids=str
)
def test_a_removed_key_is_answered_by_what_to_do(argv, write):
    write("model:\n  sinkhorn_iterations: 20\n")
    with pytest.raises(ConfigError, match=r"sinkhorn_iterations was removed; .* leave it out"):
        parsing.parse(argv)


def test_a_removed_flag_is_answered_by_what_to_do():
    with pytest.raises(ConfigError, match=r"--verify-resume.*removed.*nash_mhc\.doctor"):
        parsing.parse(["--verify-resume"])


def test_a_recorded_configuration_with_a_removed_key_still_loads():
    values = RunConfig().to_dict()
    values["model"]["sinkhorn_iterations"] = 20
    assert RunConfig.from_dict(values) == RunConfig()
