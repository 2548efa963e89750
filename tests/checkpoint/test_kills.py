"""A training process that is killed many times at random moments ends like an undisturbed one."""

import contextlib
import random
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from runs import losses
from storms import FULL, times
from training_process import BIGRAM, DENSE, TrainingProcess, arrays

from nash_mhc.checkpoint import manifest

# More steps than the lives come to before the last kill, two or three each; what is behind it is like any other run.
STEPS, KILLS, STORMS = 40, times(10, 6), 2
MODEL = DENSE if FULL else BIGRAM  # of a short life, most goes into tracing the step
FLAGS = (
    f"--total-steps {STEPS} --checkpoint-interval 2 --log-interval 1 --keep-last 2 --schedule constant --warmup-steps 0 "
    "--ema-decay 0.9"
).split()


def is_saving(folder):
    return bool(list(folder.glob("checkpoints/*.saving")))


class Killed:
    """A run whose process is killed at random moments, most of them in the loop and in a save,
    until it has come to its end."""

    def __init__(self, folder, chance, kills):
        self.folder, self.kills, self.while_saving = folder, 0, 0
        while True:
            self.last = life = TrainingProcess(folder, *FLAGS, model=MODEL, NO_EVALUATION="1")
            if self.kills < kills:
                if chance.random() < 0.25:
                    time.sleep(chance.uniform(0, 2))  # starting, restoring, setting aside
                else:
                    life.until("starting from").until(f"/{STEPS}")
                    while life.alive and not is_saving(folder):
                        time.sleep(0.001)
                    time.sleep(chance.expovariate(1 / 0.05))
                with contextlib.suppress(ProcessLookupError):  # it has come to its end
                    life.send(signal.SIGKILL)
            self.code = life.end()
            if self.code != -signal.SIGKILL:
                return
            self.kills += 1
            self.while_saving += is_saving(folder)


def storm(folder, seed):
    """As many runs as it takes to be killed so often: how far one comes between two kills is the machine's business."""
    chance, runs, left = random.Random(seed), [], KILLS
    while left > 0:
        runs.append(Killed(folder / f"run{seed}-{len(runs)}", chance, left))
        left -= runs[-1].kills
    return runs


@pytest.fixture(scope="module")
def storms(tmp_path_factory):
    """Two runs at a time, one a core; and the one that nobody kills."""
    folder = tmp_path_factory.mktemp("kills")
    found = []
    threads = [threading.Thread(target=lambda seed=seed: found.extend(storm(folder, seed))) for seed in range(STORMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unbroken = TrainingProcess(folder / "unbroken", *FLAGS, model=MODEL, NO_EVALUATION="1")
    assert unbroken.end() == 0, unbroken.said
    yield folder / "unbroken", found
    shutil.rmtree(folder)


def test_a_run_killed_many_times_ends_like_an_undisturbed_one(storms):
    unbroken, killed = storms
    assert sum(run.kills for run in killed) == KILLS * STORMS
    assert sum(run.while_saving for run in killed) >= 5, "no kill came during a save"
    wanted = arrays(unbroken, STEPS)
    for run in killed:
        assert run.code == 0, run.last.said
        assert losses(run.folder) == losses(unbroken)
        found = arrays(run.folder, STEPS)
        assert set(found) == set(wanted)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_kills_leave_no_files(storms):
    for run in storms[1]:
        left = {path.name for path in (run.folder / "checkpoints").iterdir()}
        assert left == {str(STEPS - 2), str(STEPS)} | {name for name in left if name.isdecimal()}, left
        assert all(manifest.problem(run.folder / "checkpoints" / name) is None for name in left)
