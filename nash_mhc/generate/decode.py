"""A run's folder -> its weights on one device, ready to write; and, from where they live, the functions that then do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import SingleDeviceSharding

from nash_mhc.checkpoint.faults import one_line
from nash_mhc.checkpoint.folders import exists
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.places import Folder, place
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.tokens import Tokenizer, load_tokenizer, stream_text
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.sampling import generate_tokens, keep_likely, sample
from nash_mhc.train.state import abstract_state

__all__ = ["Loaded", "generate_tokens", "keep_likely", "load", "sample", "stream_text"]


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    tokenizer: Tokenizer
    model: LanguageModel  # the averaged weights where the run kept them
    step: int
    dtype: str  # to compute in


def _host() -> jax.Device:
    """Where a checkpoint is unpacked: an accelerator need then only hold the weights, not the optimizer's moments, too."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS may leave the host out
        return jax.devices()[0]


def _read_config(folder: Folder) -> RunConfig:
    """The configuration that the run wrote down for itself."""
    with one_line(folder):
        found = exists(folder, kind="directory")
    if not found:
        raise ConfigError(f"{folder}: no such folder; give the folder of a run (the text to go on from is --prompt)")
    path = folder / "run.json"
    try:
        return RunConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))["config"])
    except FileNotFoundError:
        raise ConfigError(f"{folder}: it has no run.json, so it is not the folder of a run") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no configuration of a run ({type(error).__name__}: {error})") from error


def load(folder: str | Folder, step: int | None = None, *, say: Callable[[str], None] = lambda text: None) -> Loaded:
    """The run in `folder` at `step` (default: its last checkpoint), on this machine's first device, whatever mesh wrote it.

    `say` hears of the reading, once nothing stands in its way.
    """
    folder = place(folder)
    cfg = _read_config(folder)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if not exists(folder / "checkpoints", kind="directory"):  # asked first: opening a Store would make the folder
        raise ConfigError(f"{folder} holds no checkpoint; the run saves its first one at --checkpoint-interval or at its end")
    with Store(folder) as store:
        steps = store.steps()
        if not steps:
            raise ConfigError(f"{folder}/checkpoints holds no finished checkpoint; let the run reach its first save")
        if step is not None and step not in steps:
            raise ConfigError(f"--step {step}: {folder} has no such checkpoint; it has {', '.join(map(str, steps))}")
        at = SingleDeviceSharding(_host())
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), abstract_state(cfg))
        chosen = store.newest(say) if step is None else step
        if chosen is None:
            raise ConfigError(f"{folder}/checkpoints: its first save has not ended; wait for it, or let the run go on")
        say(f"reading step {chosen} of {folder} ...")
        state, _ = store.restore(chosen, like)
    device = jax.devices()[0]
    model = jax.device_put(state.best_model, device)
    # A CPU is slow at bfloat16, which an accelerator's run may have used.
    return Loaded(cfg, tokenizer, model, chosen, "float32" if device.platform == "cpu" else cfg.train.dtype)
