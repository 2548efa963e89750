"""A training process that is killed again and again, at any moment, ends where the one that was left alone does."""

import random
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from lives import Life, arrays
from test_run import rows

from nash_mhc.checkpoint import manifest

STEPS, KILLS, FOLDERS = 120, 11, 2
FLAGS = (
    f"--total-steps {STEPS} --checkpoint-interval 2 --log-interval 1 --keep-last 2 --schedule constant --warmup-steps 0 "
    "--ema-decay 0.9"
).split()


def losses(folder):
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens_seen"]) for row in rows(folder)]


class Killed:
    """A run whose process is killed at random moments, most of them in the loop, where a save is nearly always under way."""

    def __init__(self, folder, seed):
        self.folder, self.kills, self.while_saving, self.before_training = folder, 0, 0, 0
        chance = random.Random(seed)
        while self.kills < KILLS:
            life = Life(folder, *FLAGS)
            began = time.monotonic()
            if chance.random() < 0.25:
                time.sleep(chance.uniform(0, 2))  # starting, restoring, setting aside
            else:
                life.until("starting from").until(f"/{STEPS}")
                time.sleep(chance.expovariate(1 / 0.15))
            assert life.alive, f"ended after {time.monotonic() - began} s: make the run longer\n{life.said}"
            life.send(signal.SIGKILL)
            assert life.end() == -signal.SIGKILL
            self.kills += 1
            self.while_saving += bool(list(folder.glob("checkpoints/*.saving")))
            self.before_training += f"/{STEPS}" not in life.said
        self.last = Life(folder, *FLAGS)
        self.code = self.last.end()


@pytest.fixture(scope="module")
def storms(tmp_path_factory):
    """Two runs at a time, one a core; and the run that nobody kills."""
    folder = tmp_path_factory.mktemp("kills")
    found = []
    threads = [threading.Thread(target=lambda n=n: found.append(Killed(folder / f"run{n}", n))) for n in range(FOLDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unbroken = Life(folder / "unbroken", *FLAGS)
    assert unbroken.end() == 0, unbroken.said
    yield folder / "unbroken", found
    shutil.rmtree(folder)


def test_a_run_that_is_killed_again_and_again_ends_where_the_unbroken_one_does(storms):
    unbroken, killed = storms
    assert len(killed) == FOLDERS
    assert sum(run.kills for run in killed) >= 20
    assert sum(run.while_saving for run in killed) >= 5, "no kill came during a save"
    wanted = arrays(unbroken, STEPS)
    for run in killed:
        assert run.code == 0, run.last.said
        assert losses(run.folder) == losses(unbroken)
        found = arrays(run.folder, STEPS)
        assert set(found) == set(wanted)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_nothing_of_the_kills_is_left(storms):
    for run in storms[1]:
        left = {path.name for path in (run.folder / "checkpoints").iterdir()}
        assert left == {str(STEPS - 2), str(STEPS)} | {name for name in left if name.isdecimal()}, left
        assert all(manifest.problem(run.folder / "checkpoints" / name) is None for name in left)
