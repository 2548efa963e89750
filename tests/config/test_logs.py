"""Messages through `logging`: what a library user, a command and a run show.

tests/parallel/test_processes.py shows that only process 0 prints.
"""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import RUN

from nash_mhc.config import logs
from nash_mhc.config.schema import TelemetryConfig
from nash_mhc.train import __main__ as train_command
from nash_mhc.train import run

log = logging.getLogger("nash_mhc.somewhere")
PACKAGE = logging.getLogger("nash_mhc")


def one_step(folder: Path, **telemetry):
    train = dataclasses.replace(RUN.train, checkpoint_dir=str(folder), total_steps=1, eval_interval=0)
    optim = dataclasses.replace(RUN.optim, warmup_steps=0, learning_rate=1.0)  # so high that the run warns
    return dataclasses.replace(RUN, train=train, optim=optim, telemetry=TelemetryConfig(sample_tokens=0, **telemetry))


def test_import_installs_nothing_that_prints():
    code = (
        "import logging, nash_mhc.train.trainer, nash_mhc.loading.load\n"
        "package = logging.getLogger('nash_mhc')\n"
        "assert [type(h) for h in package.handlers] == [logging.NullHandler], package.handlers\n"
        "assert package.level == logging.NOTSET and package.propagate\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_command_prints_to_stderr_from_its_level_on(capsys):
    logs.configure("info")
    log.debug("hidden")
    log.info("50% of [it]")
    logs.configure("warning")  # again, as after parsing: still one handler
    log.info("hidden")
    log.warning("careful")
    assert capsys.readouterr() == ("", "50% of [it]\ncareful\n")
    logs.silence()
    log.error("hidden")
    assert capsys.readouterr() == ("", "")


def test_a_run_prints_on_stdout_and_restores_the_commands_handler(tmp_path, capsys):
    logs.configure("info")
    run(one_step(tmp_path))
    out, err = capsys.readouterr()
    assert err == ""
    assert (
        out.count("step 1/1  loss ") == out.count("starting from fresh weights") == out.count("warning: --learning-rate 1") == 1
    )
    log.info("afterwards")
    assert capsys.readouterr() == ("", "afterwards\n")


def test_a_users_console_handler_replaces_the_display(tmp_path, capsys):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    PACKAGE.setLevel(logging.INFO)
    try:
        run(one_step(tmp_path))
    finally:
        logging.getLogger().removeHandler(handler)
        PACKAGE.setLevel(logging.NOTSET)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("step 1/1  loss ") == 1
    assert err.count("WARNING nash_mhc.train.run_record: warning: --learning-rate 1") == 1


def test_the_root_handler_that_absl_adds_repeats_nothing(tmp_path, capsys):
    """absl calls logging.basicConfig while Orbax is imported."""
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        run(one_step(tmp_path / "a"))
        out, err = capsys.readouterr()
        assert out.count("step 1/1  loss ") == 1 and err == ""
        run(one_step(tmp_path / "b"), quiet=True)
        assert capsys.readouterr() == ("", "")
        logs.configure("info")
        log.info("once")
        assert capsys.readouterr() == ("", "once\n")
        logs.silence()
        log.warning("shown by the caller's handler")
        assert capsys.readouterr().err.count("shown") == 1
    finally:
        logging.getLogger().removeHandler(handler)


def test_a_quiet_run_still_gives_its_records_to_the_user(tmp_path, capsys, messages):
    run(one_step(tmp_path), quiet=True)
    assert capsys.readouterr() == ("", "")
    assert sum(text.startswith("step 1/1  loss ") for text in messages) == 1
    assert PACKAGE.level == logging.INFO  # as the user has set it


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_level_warning_silences_a_run_but_for_its_warnings(tmp_path, capsys, log_format):
    run(one_step(tmp_path, log_level="warning", log_format=log_format))
    (line,) = capsys.readouterr().out.splitlines()
    text = json.loads(line)["text"] if log_format == "json" else line
    assert text.startswith("warning: --learning-rate 1")
    assert PACKAGE.level == logging.NOTSET


def test_the_level_is_no_setting_of_the_run(tmp_path, capsys, monkeypatch):
    """A resumed run neither inherits it nor reports that it has changed."""
    run(one_step(tmp_path, log_level="error"))
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path)])
    assert train_command.main() == 0
    out = capsys.readouterr().out
    assert "all 1 steps are already done" in out
    assert "settings changed" not in out


def test_the_level_may_be_given_in_a_file_and_to_commands_without_a_configuration(capsys):
    from nash_mhc.config.parsing import parse
    from nash_mhc.generate.__main__ import parse as parse_generate

    assert parse(["--log-level", "debug"]).config.telemetry.log_level == "debug"
    assert parse(["telemetry.log_level=error"]).config.telemetry.log_level == "error"
    assert parse_generate(["runs/a", "--log-level", "warning"]).log_level == "warning"
