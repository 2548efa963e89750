"""Find this process's index among those of a run, from flags or the variables of a scheduler or launcher.

JAX's own cluster detection is used for TPU pods. It does not know torchrun, and its errors name no missing variable.
"""

from __future__ import annotations

import importlib.util
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nash_mhc.config.schema import ConfigError, MeshConfig


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
    launchers = _by_jax_variables, _by_torchrun, _by_slurm, _by_open_mpi, _by_tpu_pod, _by_kubernetes
    return next((found for launcher in launchers if (found := launcher(env)) is not None), None)


# Variables that other frameworks read: (meaning, field, flag).
_UNREAD = {
    "TPU_NUM_DEVICES": ("the number of devices", "num_devices", "--num-devices"),
    "USE_TPU": ("the platform", "platform", "--platform"),
}


def unread_variables(cfg: MeshConfig, env: Mapping[str, str]) -> list[str]:
    """Return a line for each variable that is set but ignored, with the flag to use, unless the flag is given."""
    lines = []
    for name, (meaning, field, flag) in _UNREAD.items():
        if env.get(name) and getattr(cfg, field) == getattr(MeshConfig(), field):
            value = env[name] if field == "num_devices" else ("cpu" if env[name].lower() in ("0", "false", "no") else "tpu")
            lines.append(f"{name}={env[name]} is ignored; use {flag} {value} to set {meaning}")
    return lines


def _by_torchrun(env: Mapping[str, str]) -> Place | None:
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


def _by_jax_variables(env: Mapping[str, str]) -> Place | None:
    if not env.get("JAX_COORDINATOR_ADDRESS") or int(env.get("JAX_NUM_PROCESSES", 1)) < 2:
        return None
    return Place(env["JAX_COORDINATOR_ADDRESS"], int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"]))


def _own_device(env: Mapping[str, str], local_index: int, local_count: int) -> int | None:
    """Return the device for a process that shares its node; None if the scheduler has already assigned one."""
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    return local_index if local_count > 1 and (not visible or "," in visible) else None


def _by_slurm(env: Mapping[str, str]) -> Place | None:
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


def _by_open_mpi(env: Mapping[str, str]) -> Place | None:
    count = int(env.get("OMPI_COMM_WORLD_SIZE", 1))
    if count < 2:
        return None
    # Up to version 4, the launcher gives its own address: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    uri = re.match(r"(\d+)\..*?tcp6?://\[?([^,\]:]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri is None:
        raise ConfigError(
            f"Open MPI started {count} processes but gives no address; add --coordinator-address HOST:PORT of rank 0, "
            f"--num-processes {count} and --process-id $OMPI_COMM_WORLD_RANK"
        )
    port = 61440 + int(uri[1]) // 4096 % 4096
    local = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    return Place(f"{uri[2]}:{port}", count, int(env["OMPI_COMM_WORLD_RANK"]), _own_device(env, *local))


def _by_tpu_pod(env: Mapping[str, str]) -> Place | None:
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


def _by_kubernetes(env: Mapping[str, str]) -> Place | None:
    """Indexed jobs on GPUs. Only the cluster's API, which JAX can query, knows the number of pods."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    if importlib.util.find_spec("kubernetes") is not None:
        return Place()
    if env["JOB_COMPLETION_INDEX"] == "0":
        return None
    raise ConfigError(
        "cannot find the other pods of this Kubernetes job; pip install kubernetes, or "
        "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (JOB_COMPLETION_INDEX) in each pod"
    )
