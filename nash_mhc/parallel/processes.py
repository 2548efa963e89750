"""Joining the processes of a run: place of this process, roll call, JAX's initialization, and loss of process 0."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.parallel.board import coordinator_answers
from nash_mhc.runtime.compat.jax import distributed_state, has_distributed_state, when_heartbeats_stop

_CONNECT_S = 300  # when JAX finds the processes itself: a container may still be pulling its image
_NEVER_S = 10**6  # JAX aborts without naming the lost process, so runtime/watchdog.py must be faster
_TRY_AGAIN = 75  # as in runtime/signals.py, which is not imported here


def start(cfg: MeshConfig) -> int:
    """Join the other processes of the run, if any, before devices are used; return the number of processes."""
    if jax.distributed.is_initialized() or (own := find_place(cfg, os.environ)) is None:
        return distributed_state().num_processes or 1
    if not has_distributed_state():
        raise ConfigError(f"jax {jax.__version__} does not expose its coordination client; start one process, or use jax 0.12")
    jax.config.update("jax_enable_preemption_service", False)  # runtime/signals.py handles signals
    options: dict[str, Any] = {"initialization_timeout": _CONNECT_S, "heartbeat_timeout_seconds": _NEVER_S}
    options["shutdown_timeout_seconds"] = _NEVER_S  # the last checkpoint of process 0 may take long
    if own.address is not None:
        assert own.count is not None and own.index is not None
        roll_call(own.address, own.count, own.index, cfg.connect_timeout)
        local = None if own.local_device is None else [own.local_device]
        options |= {"coordinator_address": own.address, "num_processes": own.count, "process_id": own.index}
        options |= {"local_device_ids": local, "cluster_detection_method": "deactivate"}
    try:
        with _catch_lost_coordinator():
            jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        where = f"process {own.index} of {own.count} at {own.address}" if own.address else "the processes of this pod"
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: the processes did not find each other within {_CONNECT_S} s ({why})") from None
    return int(distributed_state().num_processes)


# --- this process's place among the others ---------------------------------------------------------------------------
# JAX's own detection is used for TPU pods only: it does not know torchrun, and its errors name no missing variable.


@dataclass(frozen=True)
class Place:
    """The index of this process and how to reach the others. Without an address, JAX detects the rest (TPU pods)."""

    address: str | None = None
    count: int | None = None
    index: int | None = None
    local_device: int | None = None  # the only device to use, if processes share the node


def find_place(cfg: MeshConfig, env: Mapping[str, str]) -> Place | None:
    """Return this process's place, from flags or else the environment; None for a single process."""
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
            raise ConfigError(f"{given}: also needs {' and '.join(missing)}")
        own = Place(cfg.coordinator_address, cfg.num_processes, cfg.process_id)
        if not re.fullmatch(r".+:\d+", own.address or ""):
            raise ConfigError(f"--coordinator-address {own.address}: must be HOST:PORT, such as 10.0.0.1:8476")
        if (own.index or 0) >= (own.count or 0):
            raise ConfigError(f"--process-id {own.index}: must be 0 to {(own.count or 1) - 1} with --num-processes {own.count}")
        return own
    # torchrun first: srun may have started it once per node, and then SLURM's variables describe the node.
    launchers = (
        _place_from_jax_variables,
        _place_from_torchrun,
        _place_from_slurm,
        _place_from_open_mpi,
        _place_from_tpu_pod,
        _place_from_kubernetes,
    )
    return next((found for launcher in launchers if (found := launcher(env)) is not None), None)


def unread_variables(cfg: MeshConfig, env: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of other frameworks that is ignored, with the flag to use, unless it is given."""
    lines = []
    if (count := env.get("TPU_NUM_DEVICES")) and cfg.num_devices == MeshConfig().num_devices:
        lines.append(f"TPU_NUM_DEVICES={count} is ignored; use --num-devices {count} to set the number of devices")
    if (uses_tpu := env.get("USE_TPU")) and cfg.platform == MeshConfig().platform:
        platform = "cpu" if uses_tpu.lower() in ("0", "false", "no") else "tpu"
        lines.append(f"USE_TPU={uses_tpu} is ignored; use --platform {platform} to set the platform")
    return lines


def _place_from_torchrun(env: Mapping[str, str]) -> Place | None:
    """torchrun, and launchers that set the same variables, such as Kubeflow's PyTorchJob."""
    names = "WORLD_SIZE", "RANK", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    if wrong := [name for name in names if not env.get(name, "").isdecimal() and env.get(name)]:
        raise ConfigError(
            f"{wrong[0]}={env[wrong[0]]}: must be a number; unset it, or use --num-processes 1 for a single process"
        )
    count = int(env.get("WORLD_SIZE") or 1)
    if count < 2:
        return None
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]:
        raise ConfigError(
            f"WORLD_SIZE={count} is set without {' and '.join(missing)}; set them as torchrun does, or use "
            f"--coordinator-address HOST:PORT, --num-processes {count} and --process-id, or --num-processes 1"
        )
    # torchrun's own store listens at MASTER_PORT.
    port = int(env["MASTER_PORT"]) + (env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true")
    local = int(env.get("LOCAL_RANK") or 0), int(env.get("LOCAL_WORLD_SIZE") or 1)
    return Place(f"{env['MASTER_ADDR']}:{port}", count, int(env["RANK"]), _own_device(env, *local))


def _place_from_jax_variables(env: Mapping[str, str]) -> Place | None:
    if not env.get("JAX_COORDINATOR_ADDRESS") or int(env.get("JAX_NUM_PROCESSES", 1)) < 2:
        return None
    return Place(env["JAX_COORDINATOR_ADDRESS"], int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"]))


def _own_device(env: Mapping[str, str], local_index: int, local_count: int) -> int | None:
    """Return the device for a process that shares its node; None if the scheduler has already assigned one."""
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    return local_index if local_count > 1 and (not visible or "," in visible) else None


def _place_from_slurm(env: Mapping[str, str]) -> Place | None:
    # Only processes started by srun have these variables; a shell inside an allocation is a single process.
    count = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    if count < 2 or not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= set(env):
        return None
    # node[003-006,010],other -> node003
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", env["SLURM_STEP_NODELIST"])
    assert first is not None
    port = 61440 + int(env["SLURM_JOB_ID"]) % 4096  # different for jobs that share a node
    tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(count)  # 2(x3),1
    device = _own_device(env, int(env.get("SLURM_LOCALID", 0)), int(re.split(r"[(,]", tasks_per_node)[0]))
    return Place(f"{first[1]}{first[2] or ''}:{port}", count, int(env["SLURM_PROCID"]), device)


def _place_from_open_mpi(env: Mapping[str, str]) -> Place | None:
    count = int(env.get("OMPI_COMM_WORLD_SIZE", 1))
    if count < 2:
        return None
    # Up to version 4, the launcher gives its own address: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    uri = re.match(r"(\d+)\..*?tcp6?://\[?([^,\]:]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri is None:
        raise ConfigError(
            f"Open MPI started {count} processes but provides no address; add --coordinator-address HOST:PORT of rank 0, "
            f"--num-processes {count} and --process-id $OMPI_COMM_WORLD_RANK"
        )
    port = 61440 + int(uri[1]) // 4096 % 4096
    local = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    return Place(f"{uri[2]}:{port}", count, int(env["OMPI_COMM_WORLD_RANK"]), _own_device(env, *local))


def _place_from_tpu_pod(env: Mapping[str, str]) -> Place | None:
    """TPU pods, listed in variables on GKE and in metadata on Compute Engine. JAX connects their processes."""
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or int(env.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        return Place()
    chips = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    has_metadata = (chips and importlib.util.find_spec("libtpu") is not None) or "GCE_METADATA_IP" in env
    if not has_metadata or "TPU_SKIP_MDS_QUERY" in env:
        return None
    host = env.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=3) as answer:
            return Place() if answer.read().decode().count(",") else None
    except (OSError, urllib.error.URLError):
        return None  # a Colab machine, or a TPU outside Google's cloud


def _place_from_kubernetes(env: Mapping[str, str]) -> Place | None:
    """Indexed jobs on GPUs. Only the cluster's API, which JAX can query, knows the number of pods."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    if importlib.util.find_spec("kubernetes") is not None:
        return Place()
    if env["JOB_COMPLETION_INDEX"] == "0":
        return None
    raise ConfigError(
        "cannot find the other pods of this Kubernetes job; pip install kubernetes, or "
        "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID=$JOB_COMPLETION_INDEX in each pod"
    )


# --- roll call: JAX itself does not say which process is missing, and aborts with a C++ stack trace ------------------

_POLL_S = 0.2
_HANG_UP_S = 2.0
_MARGIN_S = 10.0  # process 0 may have started to wait later than the others
_ALL = "all"
_MARK = b"nash_mhc: "  # start of an answer; if JAX of an earlier run still listens, it answers something else


def roll_call(address: str, count: int, index: int, timeout: float) -> None:
    """Wait until all processes have called process 0 at `address`.

    After `timeout` seconds, raise ConfigError in every process, with the indices of the processes that have not called.
    """
    host, _, port = address.rpartition(":")
    target = (host.strip("[]"), int(port))
    answer = _collect(target[1], count, timeout) if index == 0 else _report_to_leader(target, index, timeout)
    if answer != _ALL:
        raise ConfigError(
            f"{answer.format(address=address)} within {timeout:g} s; check its output, then start all processes again, or "
            "raise --connect-timeout"
        )


def _collect(port: int, count: int, timeout: float) -> str:
    """In process 0: wait for the calls of the others and answer who is missing, or `_ALL`."""
    end, callers = time.monotonic() + timeout, dict[int, socket.socket]()
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(_listen(port, count, end))
        server.settimeout(_POLL_S)
        while len(callers) < count - 1 and time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError):
                caller = closing.enter_context(server.accept()[0])
                if 0 < (index := _index_of(caller)) < count:
                    callers[index] = caller
        missing = [index for index in range(1, count) if index not in callers]
        names = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {count}"
        answer = f"{names} did not connect to process 0 at {{address}}" if missing else _ALL
        for caller in callers.values():
            with contextlib.suppress(OSError):
                caller.sendall(_MARK + answer.encode())
    return answer


def _index_of(caller: socket.socket) -> int:
    """Return the index that a caller sends at once; hang up otherwise, and a process of the run will call again."""
    caller.settimeout(_HANG_UP_S)
    try:
        return int(caller.recv(64))
    except (OSError, ValueError):
        caller.close()
        raise


def _listen(port: int, count: int, end: float) -> socket.socket:
    """Listen at the port as soon as it is free: process 0 of the previous run may still be exiting."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, backlog=count, dualstack_ipv6=dual)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(f"process 0 (the coordinator) cannot listen at port {port} ({error.strerror})") from None
            time.sleep(_POLL_S)


def _report_to_leader(target: tuple[str, int], index: int, timeout: float) -> str:
    """In the other processes: call process 0 and return its answer."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            with socket.create_connection(target, timeout=timeout) as connection:
                connection.sendall(str(index).encode())
                connection.settimeout(timeout + _MARGIN_S)
                if (answer := connection.recv(4096)).startswith(_MARK):
                    return answer.removeprefix(_MARK).decode()
        except OSError:
            pass
        time.sleep(_POLL_S)
    return "process 0 (the coordinator) did not answer at {address}"


# --- loss of process 0 -----------------------------------------------------------------------------------------------


def report_lost_coordinator() -> None:
    address = distributed_state().coordinator_address
    text = f"process 0 (the coordinator, {address}) is gone; start all processes again to resume from the last checkpoint"
    print(f"error: {text}", file=sys.stderr, flush=True)


def _exit_if_lost() -> None:
    if not coordinator_answers():  # else the abort has another reason
        report_lost_coordinator()
        os._exit(_TRY_AGAIN)


# Called where JAX would abort because it cannot reach process 0. A run replaces it: runtime/watchdog.py.
_on_lost: Callable[[], None] = _exit_if_lost
_callbacks: list[Any] = []  # called from C until the process ends, so they must not be collected
_terminate: Callable[[], None] = os.abort  # the C++ terminate handler, which names the exception


def on_lost_coordinator(callback: Callable[[], None]) -> None:
    """Have `callback` called when process 0 is lost. If it returns, the process is aborted."""
    global _on_lost  # noqa: PLW0603
    _on_lost = callback


@contextlib.contextmanager
def _catch_lost_coordinator() -> Iterator[None]:
    """Have the JAX client created inside call `_on_lost` instead of printing a gRPC status and aborting.

    JAX 0.10 fails to convert the status for the callback and calls std::terminate, which is caught here as well. A JAX
    without the callback prints its own message first and aborts, which leads to SIGABRT.
    """
    global _terminate  # noqa: PLW0603
    on_terminate = ctypes.CFUNCTYPE(None)(_lost)
    on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _on_lost())
    _callbacks.extend((on_terminate, on_abort))
    # A C handler, because abort() does not wait for Python's signal handlers.
    ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)
    with contextlib.suppress(OSError, AttributeError):  # a C++ library other than GNU's
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.restype = ctypes.CFUNCTYPE(None)
        _terminate = set_terminate(on_terminate)
    with when_heartbeats_stop(_lost):
        yield


def _lost() -> None:
    _on_lost()
    ctypes.CDLL(None).signal(signal.SIGABRT, signal.SIG_DFL)
    _terminate()
