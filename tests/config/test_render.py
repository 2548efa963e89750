"""A configuration written as YAML: the round trip, kinds of models, profiles, and the names of other projects."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from settings import error

from nash_mhc.config import parsing, presets
from nash_mhc.config.schema import RunConfig
from nash_mhc.train.inferred_settings import infer_settings

ODD_TEXT = ["none", "None", "null", "~", "true", "12", "1e-3", " a ", "a # b", "a: b", "é😀", 'it\'s "q"', "- x"]
ODD_TEXT += ["a\nb", "\x07", "x" * 200 + " y" * 20]


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
    parse = lambda *argv: parsing.parse(["--profile-for", "tpu", *argv], found=infer_settings)
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
