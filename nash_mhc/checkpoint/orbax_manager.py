"""Orbax's manager of the checkpoints in a folder, set up for one process or several."""

from __future__ import annotations

import contextlib

import jax
import orbax.checkpoint as ocp

from nash_mhc.parallel.board import Meeting
from nash_mhc.runtime.compat.orbax import write_replicas_in_parts
from nash_mhc.storage.paths import Folder

_LEAST_PART = 2**20  # bytes of an array that one of several processes writes, where all of them have it


def new_manager(folder: Folder, name: str) -> tuple[ocp.CheckpointManager, Meeting | None]:
    """A manager for the folder, which is there, and the barrier where its threads wait for other processes.

    `name` is used once, by all processes at the same time.
    """
    several = jax.process_count() > 1
    write_replicas_in_parts(_LEAST_PART if several else None)
    # A folder that cannot be made in the background leaves threads that wait for it, and hold up the exit,
    # for ten minutes.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    processes = ocp.options.MultiprocessingOptions()
    meeting = None
    if several:
        # Orbax's usual barriers are collectives of the devices and wait forever. These have a timeout, and a name of
        # their own: one that has failed cannot be used again.
        meeting = at_once.barrier_sync_fn = Meeting(name)
        processes.active_processes = set(range(jax.process_count()))
        processes.barrier_sync_key_prefix = name
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None, create=False, async_options=at_once, multiprocessing_options=processes
    )
    handlers = {"state": ocp.StandardCheckpointHandler(), "values": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers), meeting


def close_manager(manager: ocp.CheckpointManager) -> None:
    for _ in range(8):  # a failed save is reported again by each of its threads, and only then are all of them at rest
        with contextlib.suppress(Exception):
            manager.close()
            return
