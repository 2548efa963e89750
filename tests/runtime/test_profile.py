"""`--profile`: a trace of some steps and the time per part of the model."""

import dataclasses
import re

import pytest
from runs import RUN

from nash_mhc.config.schema import ConfigError, TelemetryConfig
from nash_mhc.runtime.profile import SHOWN, parts_of
from nash_mhc.train import run


def with_profile(folder, steps):
    train = dataclasses.replace(RUN.train, checkpoint_dir=str(folder))
    return dataclasses.replace(RUN, train=train, telemetry=TelemetryConfig(sample_tokens=0, profile=steps))


def test_the_most_expensive_parts_are_printed(tmp_path, capsys):
    run(with_profile(tmp_path, "5:99"))  # there are six
    said = capsys.readouterr().out.splitlines()
    (at,) = [n for n, line in enumerate(said) if line.startswith("profile of steps 5 to 6: ")]
    found = [re.fullmatch(r" +([\d.]+)% +([\d.]+) ms/step  (.+)", line) for line in said[at + 1 : at + 1 + SHOWN]]
    shares = [float(match[1]) for match in found if match]
    assert shares == sorted(shares, reverse=True)
    assert 50.0 < sum(shares) < 100.6  # ten rounded numbers
    names = [match[3] for match in found if match]
    assert any("attention" in name for name in names)
    assert any("(backward)" in name for name in names)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_instructions_are_assigned_to_named_scopes():
    program = """
  %fusion.1 = f32[8]{0} fusion(%p), metadata={op_name="jit(traced)/eval_jaxpr/while/body/checkpoint/attention/dot_general" x=1}
  ROOT %dot.2 = f32[8]{0} dot(%a), metadata={op_name="jit(traced)/transpose(jvp(mhc))/attention/mul"}
  %add.3 = f32[8]{0} add(%a), metadata={op_name="jit(traced)/add"}
"""
    assert parts_of(program) == {"fusion_1": "attention", "dot_2": "mhc/attention (backward)", "add_3": "other"}


@pytest.mark.parametrize("text", ["5", "5:", ":5", "6:5", "0:3", "a:b", "3-5"])
def test_invalid_step_ranges_are_refused(text):
    with pytest.raises(ConfigError, match=rf"telemetry.profile '{text}': must be the first and the last step"):
        TelemetryConfig(sample_tokens=0, profile=text)


def test_finished_steps_are_not_profiled(tmp_path, capsys):
    run(with_profile(tmp_path, None), quiet=True)
    longer = with_profile(tmp_path, "3:4")
    run(dataclasses.replace(longer, train=dataclasses.replace(longer.train, total_steps=7)))
    assert re.search("--profile 3:4: nothing to profile.* 7 to 7", capsys.readouterr().out)
    assert not (tmp_path / "profile").exists()


def test_a_failed_profile_does_not_stop_the_run(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jax.profiler.start_trace", full)
    assert int(run(with_profile(tmp_path, "3:4")).state.step) == 6
    assert "no profile: OSError: [Errno 28] No space left on device; training continues" in capsys.readouterr().out
