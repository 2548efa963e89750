"""Several processes as one run: started from flags or from what the scheduler says,
with a board to leave each other notes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from nash_mhc.config.schema import ConfigError, MeshConfig

T = TypeVar("T")
_CONNECT_S = 300  # a peer whose container is still being pulled comes late
_NEVER_S = 10**6  # JAX ends a run whose peer is silent with an abort that names nobody: runtime/watchdog.py is to be first


@dataclass(frozen=True)
class Place:
    """Where this process stands among all of a run's. Without an address JAX finds its own way, as on TPU pods."""

    address: str | None = None
    count: int | None = None
    index: int | None = None
    local_device: int | None = None  # the only device that this process may use, where its node is shared


def find_place(cfg: MeshConfig, env: Mapping[str, str]) -> Place | None:
    """This process's place by flags, else by the environment; None when it is alone."""
    if cfg.num_processes == 1:
        return None
    flags = {
        "--coordinator-address": cfg.coordinator_address,
        "--num-processes": cfg.num_processes,
        "--process-id": cfg.process_id,
    }
    if any(value is not None for value in flags.values()):
        if missing := [flag for flag, value in flags.items() if value is None]:
            given = next(flag for flag, value in flags.items() if value is not None)
            raise ConfigError(f"{given}: {' and '.join(missing)} must be given as well, the same way in every process")
        own = Place(cfg.coordinator_address, cfg.num_processes, cfg.process_id)
        if not re.fullmatch(r".+:\d+", own.address or ""):
            raise ConfigError(f"--coordinator-address {own.address}: must be HOST:PORT, such as 10.0.0.1:8476")
        if (own.index or 0) >= (own.count or 0):
            raise ConfigError(
                f"--process-id {own.index}: with --num-processes {own.count} they are 0 to {(own.count or 1) - 1}"
            )
        return own
    return _by_jax_variables(env) or _by_slurm(env) or _by_open_mpi(env) or _by_tpu_pod(env) or _by_kubernetes(env)


def _by_jax_variables(env: Mapping[str, str]) -> Place | None:
    if not env.get("JAX_COORDINATOR_ADDRESS") or int(env.get("JAX_NUM_PROCESSES", 1)) < 2:
        return None
    return Place(env["JAX_COORDINATOR_ADDRESS"], int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"]))


def _own_device(env: Mapping[str, str], local_index: int, local_count: int) -> int | None:
    """Processes that share a node share its devices by number, unless the scheduler has dealt them out already."""
    dealt = env.get("CUDA_VISIBLE_DEVICES", "")
    return local_index if local_count > 1 and (not dealt or "," in dealt) else None


def _by_slurm(env: Mapping[str, str]) -> Place | None:
    # Only what srun has started has a step and a number in it:
    # a shell inside an allocation is alone, whatever its size.
    count = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    if count < 2 or not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= set(env):
        return None
    # node[003-006,010],other -> node003
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", env["SLURM_STEP_NODELIST"])
    assert first is not None
    port = 61440 + int(env["SLURM_JOB_ID"]) % 4096  # jobs that share a node should not meet
    tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(count)  # 2(x3),1
    device = _own_device(env, int(env.get("SLURM_LOCALID", 0)), int(re.split(r"[(,]", tasks_per_node)[0]))
    return Place(f"{first[1]}{first[2] or ''}:{port}", count, int(env["SLURM_PROCID"]), device)


def _by_open_mpi(env: Mapping[str, str]) -> Place | None:
    count = int(env.get("OMPI_COMM_WORLD_SIZE", 1))
    if count < 2:
        return None
    # Up to version 4 the launcher tells its own address: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    uri = re.match(r"(\d+)\..*?tcp6?://\[?([^,\]:]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri is None:
        raise ConfigError(
            f"Open MPI has started {count} processes and does not say where; add --coordinator-address HOST:PORT of rank 0, "
            f"--num-processes {count} and --process-id $OMPI_COMM_WORLD_RANK"
        )
    port = 61440 + int(uri[1]) // 4096 % 4096
    local = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    return Place(f"{uri[2]}:{port}", count, int(env["OMPI_COMM_WORLD_RANK"]), _own_device(env, *local))


def _by_tpu_pod(env: Mapping[str, str]) -> Place | None:
    """GKE tells a pod's workers in variables, Compute Engine in its metadata; JAX itself knows how to meet them."""
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or int(env.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        return Place()
    chips = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    asked = (chips and importlib.util.find_spec("libtpu") is not None) or "GCE_METADATA_IP" in env
    if not asked or "TPU_SKIP_MDS_QUERY" in env:
        return None
    host = env.get("GCE_METADATA_IP", "metadata.google.internal")
    wanted = f"http://{host}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        request = urllib.request.Request(wanted, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=3) as answer:
            return Place() if answer.read().decode().count(",") else None
    except (OSError, urllib.error.URLError):
        return None  # no pod: a Colab machine, or a TPU that is not in Google's cloud


def _by_kubernetes(env: Mapping[str, str]) -> Place | None:
    """An indexed job on GPUs. How many pods there are only the cluster's own interface tells, which JAX can ask."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    if importlib.util.find_spec("kubernetes") is not None:
        return Place()
    if env["JOB_COMPLETION_INDEX"] == "0":
        return None
    raise ConfigError(
        "this is one of several pods of a Kubernetes job, and who the others are cannot be asked; pip install kubernetes, or "
        "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (JOB_COMPLETION_INDEX) in each pod"
    )


def _joined() -> Any:
    """What JAX knows of the processes. No public name leads to it before there are devices; Orbax goes the same way.

    Should `jax._src.distributed` vanish, this function and `Board` need another way to the coordinator's notes
    (`key_value_set` and its kin); nothing else here does.
    """
    from jax._src import distributed

    return distributed.global_state


def start(cfg: MeshConfig) -> int:
    """Joins the run's other processes, if there are any, before the first use of a device;
    returns how many there are."""
    if jax.distributed.is_initialized() or (own := find_place(cfg, os.environ)) is None:
        return _joined().num_processes or 1
    jax.config.update("jax_enable_preemption_service", False)  # signals are ours: runtime/signals.py
    options: dict[str, Any] = {"initialization_timeout": _CONNECT_S, "heartbeat_timeout_seconds": _NEVER_S}
    options["shutdown_timeout_seconds"] = _NEVER_S  # the last checkpoint of process 0 may take its time
    if own.address is not None:
        local = None if own.local_device is None else [own.local_device]
        options |= {"coordinator_address": own.address, "num_processes": own.count, "process_id": own.index}
        options |= {"local_device_ids": local, "cluster_detection_method": "deactivate"}
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        where = f"process {own.index} of {own.count} at {own.address}" if own.address else "the processes of this pod"
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: the processes did not find each other within {_CONNECT_S} s ({reason})") from None
    return int(_joined().num_processes)


class Board:
    """Notes that every process can write and read, in the coordinator's memory: for the rare word, never for a step."""

    def __init__(self, name: str) -> None:
        self._client = _joined().client
        self._name = name

    def write(self, key: str, note: Any) -> None:
        self._client.key_value_set(f"{self._name}/{key}", json.dumps(note), allow_overwrite=True)

    def read(self, folder: str) -> dict[str, Any]:
        """All notes under `folder/`, by the rest of their keys."""
        found = self._client.key_value_dir_get(f"{self._name}/{folder}/")
        return {key.rpartition("/")[2]: json.loads(note) for key, note in found}

    def wait(self, key: str, seconds: float) -> Any:
        """The note under `key`, as soon as it is there; TimeoutError."""
        try:
            return json.loads(self._client.blocking_key_value_get(f"{self._name}/{key}", int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(key) from None
            raise


def coordinator_answers(seconds: float = 2.0) -> bool:
    """Whether process 0 is still there, and there all the time: one that dies loses its sockets one after another."""
    host, _, port = str(_joined().coordinator_address).rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
                pass
        except OSError:
            return False
        if time.monotonic() >= end:
            return True
        time.sleep(0.1)


_shared = 0


def from_leader(make: Callable[[], T]) -> T:
    """What process 0 makes, in every process; a ConfigError there is one everywhere. For plain values.

    All processes call it, in the same order.
    """
    global _shared  # noqa: PLW0603  (counts the calls, which are the same in all processes)
    if jax.process_count() == 1:
        return make()
    _shared += 1
    board, key = Board("nash_mhc/leader"), str(_shared)
    if jax.process_index():
        note = _patiently(board, key)
    else:
        try:
            note = {"made": make()}
        except ConfigError as error:
            note = {"refused": str(error)}
        board.write(key, note)
    if "refused" in note:
        raise ConfigError(note["refused"])
    return note["made"]


def leader_first(make: Callable[[], T]) -> T:
    """`make()` in every process, but in process 0 before all others: what it leaves on a shared disk, they find."""
    made: list[T] = []
    from_leader(lambda: made.append(make()))
    return made[0] if made else make()


def in_any_process(mine: bool) -> bool:
    """Whether `mine` is true in at least one process. Called by all, in the same order as everything here."""
    global _shared  # noqa: PLW0603
    if jax.process_count() == 1:
        return mine
    _shared += 1
    board = Board("nash_mhc/any")
    board.write(f"{_shared}/{jax.process_index()}", mine)
    return any(_patiently(board, f"{_shared}/{index}") for index in range(jax.process_count()))


def wait_for_all() -> None:
    """Until every process has come this far. (That `from_leader` returns says nothing of those who follow.)"""
    in_any_process(False)  # nobody says yes, so that all are asked


def _patiently(board: Board, key: str) -> Any:
    while True:  # preparing data may take hours; a leader that has died is noticed elsewhere
        try:
            return board.wait(key, 60)
        except TimeoutError:
            continue
