"""Damaged inputs of every kind: no traceback, and nothing half-written left behind.

`python tests/fuzzing.py TARGET SEED` shows one case. fuzz_targets.py says what is damaged and who reads it,
fuzz_files.py makes the valid inputs.
"""

import random
from pathlib import Path

import pytest
from command_process import CommandProcess
from fuzz_targets import TARGETS
from fuzzing import damage, run_case, tree

# Inputs of each target in `make test`; those that are slow to read have fewer, 500 in all.
_FEWER = {"tokenizer": 8, "hub model, imported": 12, "values, signed again": 12}
COUNTS = {name: _FEWER.get(name, 20) for name in TARGETS}


def faults(name: str, folder: Path, seeds: range) -> list[str]:
    valid = folder / "valid"
    valid.mkdir()
    TARGETS[name].make(valid)
    found = []
    for seed in seeds:
        outcome = run_case(name, TARGETS[name], seed, valid, folder)
        if outcome.fault:
            found.append(f"python tests/fuzzing.py {name!r} {seed}\n{outcome.shown}\n{outcome.fault}")
    return found


def test_there_are_five_hundred_inputs():
    assert sum(COUNTS.values()) >= 500


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_are_read_or_refused_in_one_line(tmp_path, name):
    assert not faults(name, tmp_path, range(COUNTS[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_many_more_damaged_inputs(tmp_path, name):
    assert not faults(name, tmp_path, range(COUNTS[name], 11 * COUNTS[name]))


@pytest.mark.parametrize(
    ("name", "seed", "module", "argv"),
    [
        ("jsonl text", 6, "data", ["prepare", "--workers", "1", "--dataset", "a.jsonl", "--out", "out"]),
        ("checkpoints, verified", 2, "checkpoint", ["verify", "run"]),
        ("report", 6, "report", ["run"]),
    ],
)
def test_a_command_of_its_own_ends_the_same_way(tmp_path, name, seed, module, argv):
    TARGETS[name].make(tmp_path)
    damage(TARGETS[name], random.Random(seed), tmp_path)
    before = tree(tmp_path)
    done = CommandProcess(["-m", f"nash_mhc.{module}", *argv], tmp_path).end()
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)
    assert done.returncode == 1 or (done.stderr.startswith("error: ") and done.stderr.count("\n") == 1)
    assert tree(tmp_path) == before
