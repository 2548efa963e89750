"""Two real processes of four emulated devices each:
they train as one does, stop together, and name the one that fails."""

import http.server
import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runs import rows
from training_process import DENSE, TrainingProcess, arrays, pair, slurm_pair

from nash_mhc.checkpoint import manifest
from nash_mhc.config import ConfigError
from nash_mhc.config.parsing import parse
from nash_mhc.config.schema import MeshConfig
from nash_mhc.parallel.processes import Place, find_place, roll_call, unread_variables
from nash_mhc.runtime.signals import TRY_AGAIN
from nash_mhc.train.inputs import settings_of_run

STEPS, HALF = 12, 8
MESH = "--mesh-data 2 --mesh-fsdp 2 --mesh-tp 2".split()
FLAGS = [*MESH, *f"--total-steps {STEPS} --checkpoint-interval 4 --log-interval 1 --schedule constant --warmup-steps 0".split()]


def losses(folder):
    return [(row["step"], row["loss"], row["tokens_seen"]) for row in rows(folder)]


def steps(folder):
    return manifest.saved_steps(folder / "checkpoints")


def until_whole(checkpoint, lives):
    """A checkpoint is written while training goes on; where both cores are busy, for many steps."""
    while manifest.problem(checkpoint) is not None:
        assert all(life.alive for life in lives), [life.said for life in lives]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes") / "run"
    # Several processes have the evaluation compiled before the first step: what comes behind the step's never would.
    both = pair(folder, *FLAGS, "--keep-every", str(HALF), model=DENSE, NO_PROGRAM_OF_THE_EVALUATION="1")
    assert [life.end() for life in both] == [0, 0], both[0].said + both[1].said
    assert "8 x cpu in 2 processes, mesh 2x2x2" in both[0].said
    assert "step" not in both[1].said  # one of them speaks for all
    return folder


def test_two_processes_match_one_and_one_resumes_from_two(unbroken, tmp_path):
    """Half of the run by two processes, the other half by one, on another mesh:
    the losses of both halves are those of two."""
    shutil.copytree(unbroken, tmp_path / "run")
    for step in steps(tmp_path / "run"):
        if step > HALF:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    flags = [flag for flag in FLAGS if flag not in MESH]
    alone = TrainingProcess(tmp_path / "run", *flags, "--mesh-fsdp", "4", "--mesh-tp", "2", model=DENSE, NO_EVALUATION="1")
    assert alone.end() == 0, alone.said
    assert f"starting from step {HALF} of this run" in alone.said
    first = TrainingProcess(tmp_path / "first", *flags, *MESH, model=DENSE, NO_EVALUATION="1")
    assert first.end() == 0, first.said
    for folder in (tmp_path / "run", tmp_path / "first"):
        for (step, loss, tokens), (wanted_step, wanted, wanted_tokens) in zip(losses(folder), losses(unbroken), strict=True):
            assert (step, tokens) == (wanted_step, wanted_tokens)
            assert loss == pytest.approx(wanted, rel=1e-4)


def test_a_signal_to_one_process_stops_both_at_the_same_step_and_the_resume_is_bit_equal(unbroken, tmp_path):
    both = pair(tmp_path / "run", *FLAGS, model=DENSE, NO_EVALUATION="1")
    both[0].until(f"step  3/{STEPS}")
    both[1].send()
    assert [life.end() for life in both] == [TRY_AGAIN] * 2, both[0].said + both[1].said
    saved = steps(tmp_path / "run")[-1]
    assert 3 <= saved < STEPS
    assert f"stopped: step {saved} is saved in {tmp_path / 'run'}" in both[0].said
    both = pair(tmp_path / "run", *FLAGS, model=DENSE, NO_EVALUATION="1")
    assert [life.end() for life in both] == [0, 0], both[0].said + both[1].said
    assert f"starting from step {saved} of this run" in both[0].said
    assert losses(tmp_path / "run") == losses(unbroken)
    wanted = arrays(unbroken, STEPS)
    for name, value in arrays(tmp_path / "run", STEPS).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


@pytest.mark.parametrize(("killed", "start"), [pytest.param(0, pair, marks=pytest.mark.long), (1, slurm_pair)])
def test_a_killed_peer_is_named_and_the_other_exits(tmp_path, killed, start):
    both = start(tmp_path / "run", *FLAGS, "--total-steps", "100000", "--keep-last", "1000", NO_EVALUATION="1")
    both[0].until("step      5/")
    until_whole(tmp_path / "run" / "checkpoints" / "4", both)
    both[killed].send(signal.SIGKILL)
    assert both[1 - killed].end() == TRY_AGAIN, both[1 - killed].said
    last = both[1 - killed].said.splitlines()[-1]
    assert last.startswith(f"error: process {killed} ")
    assert "resume from the last checkpoint" in last
    assert manifest.problem(tmp_path / "run" / "checkpoints" / "4") is None


def test_a_finished_process_exits_normally_even_without_process_0(tmp_path):
    both = pair(tmp_path / "run", *FLAGS, "--total-steps", "4", second={"NEVER_LEAVES": "1"}, NO_EVALUATION="1")
    both[1].until("on its way out")
    both[0].send(signal.SIGKILL)
    assert both[1].end() == 0, both[1].said
    assert "process 0 is gone" not in both[1].said


@pytest.mark.long
def test_a_stalled_peer_is_named_with_phase_and_stack_and_both_exit(tmp_path):
    flags = [*FLAGS, "--stall-timeout", "500"]
    env = {"SHORT_STALL_ONCE": str(tmp_path / "now"), "NO_EVALUATION": "1"}
    both = pair(tmp_path / "run", *flags, second={"STALL_AT_STEP": "9"}, **env)
    both[1].until("stalled")
    until_whole(tmp_path / "run" / "checkpoints" / "4", both)
    (tmp_path / "now").touch()
    assert [life.end() for life in both] == [TRY_AGAIN] * 2, both[0].said + both[1].said
    for life in both:
        named = r"error: no progress for \d+ s \(--stall-timeout\): process 1 \(.*, pid \d+\) is stuck in phase 'reading"
        assert re.search(named, life.said), life.said
        assert "patient for 500 s so far" in life.said
    assert "stack of process 1:" in both[0].said  # the one log that people read tells it all
    assert "in never_comes" in both[0].said
    assert manifest.problem(tmp_path / "run" / "checkpoints" / "4") is None


def test_a_single_stalled_process_reports_its_phase(tmp_path):
    env = {"SHORT_STALL_ONCE": str(tmp_path / "now"), "NO_EVALUATION": "1"}
    life = TrainingProcess(tmp_path / "run", "--total-steps", "9", STALL_AT_STEP="5", **env)
    life.until("stalled")
    (tmp_path / "now").touch()
    assert life.end() == TRY_AGAIN
    assert re.search(r"error: no progress for \d+ s \(--stall-timeout\): this process is stuck in phase 'reading", life.said)
    assert "in never_comes" in life.said


SLURM = {
    "SLURM_JOB_ID": "5000", "SLURM_STEP_NODELIST": "node[003-006,010],other", "SLURM_NTASKS": "8", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, None),
        (SLURM, Place("node003:62344", 8, 5, 1)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, Place("node003:62344", 8, 5, None)),  # dealt out already
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}, Place("node003:62344", 8, 5, None)),
        (SLURM | {"SLURM_STEP_NODELIST": "alone", "SLURM_STEP_NUM_TASKS": "2"}, Place("alone:62344", 2, 5, 1)),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, None),  # a shell in an allocation
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (MPI, Place("10.96.0.1:62624", 4, 3, None)),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (JAX, Place("a:1", 3, 2, None)),
        (TORCHRUN, Place("node1:29501", 4, 3, 1)),
        (SLURM | TORCHRUN, Place("node1:29501", 4, 3, 1)),  # srun started one torchrun on each node
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        # By hand, or by Kubeflow: nothing else listens at that port.
        ({k: TORCHRUN[k] for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}, Place("node1:29500", 4, 3, None)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, Place()),  # GKE
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        ({"MEGASCALE_NUM_SLICES": "2"}, Place()),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, None),
        ({"KUBERNETES_SERVICE_HOST": "x"}, None),
    ],
)
def test_a_scheduler_is_recognised(env, wanted):
    assert find_place(MeshConfig(), env) == wanted
    assert find_place(MeshConfig(num_processes=1), env) is None  # alone, whatever the scheduler says
    flags = MeshConfig(coordinator_address="b:2", num_processes=4, process_id=1)
    assert find_place(flags, env) == Place("b:2", 4, 1)


@pytest.mark.parametrize(("workers", "wanted"), [("a:8470:1,b:8470:2", Place()), ("a:8470:1", None)])
def test_a_tpu_pod_is_recognised_by_its_metadata(workers, wanted):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            good = self.path.endswith("/attributes/worker-network-endpoints") and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if good else 404)
            self.end_headers()
            self.wfile.write(workers.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("localhost", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"GCE_METADATA_IP": f"localhost:{server.server_port}"}
        assert find_place(MeshConfig(), env) == wanted
        assert find_place(MeshConfig(), env | {"TPU_SKIP_MDS_QUERY": "1"}) is None
        server.shutdown()


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        ({"num_processes": 2}, {}, r"--num-processes: also needs --coordinator-address and --process-id"),
        ({"coordinator_address": "a", "num_processes": 2, "process_id": 0}, {}, r"a: must be HOST:PORT"),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, {}, r"--process-id 2: must be 0 to 1 with"),
        ({}, MPI | {"OMPI_MCA_orte_hnp_uri": ""}, r"Open MPI started 4 processes .*; add --coordinator-address HOST:PORT"),
        ({}, {"RANK": "1", "WORLD_SIZE": "4"}, r"WORLD_SIZE=4 .* MASTER_ADDR and MASTER_PORT.* --coordinator-address"),
        ({}, TORCHRUN | {"MASTER_PORT": "x"}, r"MASTER_PORT=x"),
        ({}, {"WORLD_SIZE": "many"}, r"WORLD_SIZE=many"),
        ({}, {"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1"}, r"pip install kubernetes, or set JAX_COORD"),
    ],
)
def test_inconsistent_variables_are_one_line_errors(flags, env, message):
    with pytest.raises(ConfigError, match=message):
        find_place(MeshConfig(**flags), env)


@pytest.mark.parametrize(
    ("env", "cfg", "flags"),
    [
        ({"TPU_NUM_DEVICES": "4"}, {}, ["--num-devices 4"]),
        ({"TPU_NUM_DEVICES": "4"}, {"num_devices": 2}, []),
        ({"USE_TPU": "1"}, {}, ["--platform tpu"]),
        ({"USE_TPU": "0", "TPU_NUM_DEVICES": "1"}, {}, ["--num-devices 1", "--platform cpu"]),
        ({"USE_TPU": "1"}, {"platform": "gpu"}, []),
        ({}, {}, []),
    ],
)
def test_an_ignored_variable_is_reported_with_its_flag(env, cfg, flags):
    lines = unread_variables(MeshConfig(**cfg), env)
    assert len(lines) == len(flags)
    for line, flag in zip(lines, flags, strict=True):
        assert flag in line
        assert any(f"{name}={value}" in line for name, value in env.items())


def test_processes_compare_settings_and_files_but_not_their_own_flags(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one\n" * 1000)

    def compared(*flags):
        return settings_of_run(parse(["--dataset", str(text), *flags], prog="train").config)

    before = compared("--process-id", "0", "--coordinator-address", "a:1", "--num-processes", "2")
    assert compared("--process-id", "1", "--coordinator-address", "b:1", "--num-processes", "2") == before
    changed = compared("--seed", "3")
    assert {name for name in before if before[name] != changed[name]} == {"--seed"}
    text.write_text("two\n" * 1000)
    changed = compared()
    assert {name for name in before if before[name] != changed[name]} == {f"the files of {text}"}


@pytest.mark.parametrize(
    ("who", "said"),
    [(0, r"process 0 \(the coordinator\) did not answer at \S+"), (1, r"process 1 of 2 did not connect to process 0 at \S+")],
)
def test_a_process_with_invalid_flags_is_named_by_the_other(who, said, tmp_path):
    both = pair(tmp_path / "run", *FLAGS, "--connect-timeout", "6", flags_of={who: ["--total-steps", "none"]})
    assert [life.end() for life in both] == [2, 2], both[0].said + both[1].said
    assert re.search(rf"^error: {said} within 6 s; .*--connect-timeout$", both[1 - who].said, re.MULTILINE), both[1 - who].said
    assert "Traceback" not in both[1 - who].said and "stack trace" not in both[1 - who].said


def test_a_roll_call_waits_for_the_port_and_ignores_other_answers():
    """As where all processes start again and the process 0 of before, in which JAX listens, has not left yet."""
    with ThreadPoolExecutor(2) as threads:
        with socket.create_server(("localhost", 0)) as before:
            address = f"localhost:{before.getsockname()[1]}"
            both = [threads.submit(roll_call, address, 2, number, 60.0) for number in range(2)]
            with before.accept()[0] as caller:
                caller.sendall(b"\x00\xff")
        assert [each.result() for each in both] == [None, None]


@pytest.mark.parametrize("missing", [(), (2,), (1, 3), (0,)])
def test_a_roll_call_ends_alike_in_all_processes(missing):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"

    def ended(number):
        time.sleep(0.3 * (number == 0))  # the others may come first
        try:
            return roll_call(address, 4, number, 2.0 if missing else 60.0)
        except ConfigError as error:
            return str(error).partition(" within 2 s")[0]

    wanted = {
        (): None,
        (2,): f"process 2 of 4 did not connect to process 0 at {address}",
        (1, 3): f"processes 1, 3 of 4 did not connect to process 0 at {address}",
        (0,): f"process 0 (the coordinator) did not answer at {address}",
    }[missing]
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(ended, sorted({*range(4)} - {*missing}))) == {wanted}
