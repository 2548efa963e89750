"""A run's folder -> its weights on one device, ready to write;
and, from where they live, the functions that then do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import SingleDeviceSharding

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer, stream_text
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.sampling import generate_tokens, keep_likely, sample
from nash_mhc.storage.files import exists
from nash_mhc.storage.paths import Folder
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
    """Where a checkpoint is unpacked: an accelerator need then only hold the weights, not the optimizer's moments,
    too."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS may leave the host out
        return jax.devices()[0]


def load(folder: str | Folder, step: int | None = None, *, say: Callable[[str], None] = lambda text: None) -> Loaded:
    """The run in `folder` at `step` (default:
    its last checkpoint), on this machine's first device, whatever mesh wrote it.

    `say` hears of the reading, once nothing stands in its way.
    """
    run = RunFolder(folder)
    cfg = run.config(hint=" (the text to go on from is --prompt)")
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if not exists(run.checkpoints, kind="directory"):  # asked first: opening a Store would make the folder
        raise ConfigError(f"{folder} holds no checkpoint; the run saves its first one at --checkpoint-interval or at its end")
    with Store(run.path) as store:
        steps = store.steps()
        if not steps:
            raise ConfigError(f"{run.checkpoints} holds no finished checkpoint; let the run reach its first save")
        if step is not None and step not in steps:
            raise ConfigError(f"--step {step}: {folder} has no such checkpoint; it has {', '.join(map(str, steps))}")
        at = SingleDeviceSharding(_host())
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), abstract_state(cfg))
        chosen = store.newest(say) if step is None else step
        if chosen is None:
            raise ConfigError(f"{run.checkpoints}: its first save has not ended; wait for it, or let the run go on")
        say(f"reading step {chosen} of {folder} ...")
        state, _ = store.restore(chosen, like)
    device = jax.devices()[0]
    model = jax.device_put(state.best_model, device)
    # A CPU is slow at bfloat16, which an accelerator's run may have used.
    return Loaded(cfg, tokenizer, model, chosen, "float32" if device.platform == "cpu" else cfg.train.dtype)
