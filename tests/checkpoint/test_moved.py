"""A folder that is moved away again and again, at any moment of a real run's saves:
told, made again, and nothing is lost."""

import random
import shutil
import time

import numpy as np
import pytest
from storms import times
from training_process import TrainingProcess, arrays

MOVES, STEPS = times(50, 15), 100_000
FLAGS = f"--total-steps {STEPS} --checkpoint-interval 1 --log-interval 1 --schedule constant --warmup-steps 0".split()


@pytest.mark.long
def test_a_run_whose_directory_is_moved_many_times_ends_like_an_undisturbed_one(tmp_path):
    folder, chance = tmp_path / "run", random.Random(0)
    life = TrainingProcess(folder, *FLAGS, IMPATIENT="1", NO_EVALUATION="1").until("step      1/")
    for number in range(MOVES):
        # Until it is made again and a save is under way: then at any moment of it, or shortly after.
        while not list(folder.glob("checkpoints/*.saving")):
            assert life.alive, life.said
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        folder.rename(tmp_path / f"moved-{number}")
    while not list(folder.glob("checkpoints/*/manifest.json")):
        assert life.alive, life.said
        time.sleep(0.001)
    life.send()
    assert life.end() == 75, life.said
    said = life.said
    assert "Traceback" not in said
    assert "Error" not in said
    assert said.count("which had vanished") >= MOVES * 0.9  # two moves may come before one save
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    assert f"stopped: step {step} is saved in {folder}" in said
    # What is there is whole, and what the run would have come to without any of this.
    quiet = TrainingProcess(
        tmp_path / "quiet", *FLAGS, "--total-steps", str(step), "--checkpoint-interval", "0", NO_EVALUATION="1"
    )
    assert quiet.end() == 0, quiet.said
    found, wanted = arrays(folder, step), arrays(tmp_path / "quiet", step)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    again = TrainingProcess(folder, *FLAGS, "--total-steps", str(step + 5), NO_EVALUATION="1")
    assert again.end() == 0, again.said
    assert f"starting from step {step} of this run" in again.said
    shutil.rmtree(tmp_path)
