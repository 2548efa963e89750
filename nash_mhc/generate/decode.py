"""Load a run's weights onto one device, choose token after token, turn tokens into text that can be shown at once."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.tokens import Tokenizer, load_tokenizer
from nash_mhc.model.lm import LM, Execution
from nash_mhc.train.state import abstract_state

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # what tokenizers put where bytes do not (yet) make a character


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    tokenizer: Tokenizer
    model: LM  # the averaged weights where the run kept them
    step: int
    execution: Execution


def _host() -> jax.Device:
    """Where a checkpoint is unpacked: an accelerator need then only hold the weights, not the optimizer's moments, too."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS may leave the host out
        return jax.devices()[0]


def _read_config(folder: Path) -> RunConfig:
    """The configuration that the run wrote down for itself."""
    if not folder.is_dir():
        raise ConfigError(f"--checkpoint-dir {folder}: no such folder; give the folder of a run")
    path = folder / "run.json"
    try:
        return RunConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))["config"])
    except FileNotFoundError:
        raise ConfigError(f"--checkpoint-dir {folder}: it has no run.json, so it is not the folder of a run") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no configuration of a run ({type(error).__name__}: {error})") from error


def load(folder: str | Path, step: int | None = None) -> Loaded:
    """The run in `folder` at `step` (default: its last checkpoint), on this machine's first device, whatever mesh wrote it."""
    folder = Path(folder)
    cfg = _read_config(folder)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if not (folder / "checkpoints").is_dir():  # asked first: opening a Store would make the folder
        raise ConfigError(f"{folder} holds no checkpoint; the run saves its first one at --checkpoint-interval or at its end")
    with Store(folder) as store:
        steps = store.steps()
        if not steps:
            raise ConfigError(f"{folder}/checkpoints holds no finished checkpoint; let the run reach its first save")
        if step is not None and step not in steps:
            raise ConfigError(f"--step {step}: {folder} has no such checkpoint; it has {', '.join(map(str, steps))}")
        at = SingleDeviceSharding(_host())
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), abstract_state(cfg))
        chosen = max(steps) if step is None else step
        state, _ = store.restore(chosen, like)
    device = jax.devices()[0]
    model = jax.device_put(state.model if state.ema is None else state.ema, device)
    # The kernel that runs anywhere, at any length; and a CPU is slow at bfloat16, which an accelerator's run may have used.
    execution = Execution("float32" if device.platform == "cpu" else cfg.train.dtype, attention="xla")
    return Loaded(cfg, tokenizer, model, chosen, execution)


@functools.partial(jax.jit, static_argnames="execution")
def next_logits(
    model: LM, tokens_T: Int[Array, "T"], count: Int[Array, ""], execution: Execution = Execution()
) -> Float[Array, "V"]:
    """Logits of the token after the first `count` of the buffer. Attention is causal: what lies behind them has no say."""
    return model(tokens_T[None], execution=execution)[0, count - 1]


def keep_likely(logits_V: Float[Array, "V"], top_k: int, top_p: float) -> Float[Array, "V"]:
    """Logits with -inf outside the `top_k` best (0: all), then outside the fewest of those whose mass reaches `top_p`."""
    # By rank rather than by threshold: among equal logits exactly k stay, the first ones, as argmax would choose.
    order_V = jnp.argsort(-logits_V, stable=True)
    sorted_V = logits_V[order_V]
    if top_k > 0:
        sorted_V = jnp.where(jnp.arange(sorted_V.size) < top_k, sorted_V, -jnp.inf)
    if top_p < 1:
        mass_V = jax.nn.softmax(sorted_V)
        before_V = jnp.cumsum(mass_V) - mass_V  # the best token has nothing before it, so it always stays
        sorted_V = jnp.where(before_V < top_p, sorted_V, -jnp.inf)
    return jnp.zeros_like(logits_V).at[order_V].set(sorted_V)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def sample(
    logits_V: Float[Array, "V"], key: PRNGKeyArray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Int[Array, ""]:
    """One token id: at temperature 0 the best, otherwise a draw from softmax(logits / temperature), cut to the likely ones."""
    if temperature == 0:
        return jnp.argmax(logits_V)
    # The best at zero and a floor under the divisor: no temperature, however low, divides to inf or NaN.
    scaled_V = (logits_V - jnp.max(logits_V)) / max(temperature, 1e-6)
    return jax.random.categorical(key, keep_likely(scaled_V, top_k, top_p))


def generate_tokens(
    model: LM,
    prompt_tokens: Sequence[int] | np.ndarray,
    *,
    seq_len: int,
    end: int,
    max_tokens: int = 400,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    execution: Execution = Execution(),
) -> Iterator[int]:
    """Yields new tokens until `end` (not yielded) or `max_tokens`. Text longer than `seq_len` is seen through a sliding window.

    A document begins with `end`, so a prompt usually does, too. The same arguments give the same tokens.
    """
    tokens = [int(t) for t in prompt_tokens]
    if not tokens:
        raise ValueError("the model needs a token to begin with; a new document begins with the tokenizer's end token")
    key = jax.random.key(seed)
    buffer_T = np.full(seq_len, end, np.int32)  # one shape for the whole text: compiled once
    for i in range(max_tokens):
        window = tokens[-seq_len:]
        buffer_T[: len(window)] = window
        # The copy: on a CPU, JAX may read the array that it is given later, when the next token is in it already.
        logits_V = next_logits(model, jnp.array(buffer_T), jnp.asarray(len(window)), execution)
        token = int(sample(logits_V, jax.random.fold_in(key, i), temperature, top_k, top_p))
        if token == end:
            return
        tokens.append(token)
        yield token


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text as soon as it is certain: the pieces join to decode(all tokens), and none ends within a character."""
    seen: list[int] = []
    text, shown = "", 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(np.array(seen, np.int32))
        # A character is at most four bytes: up to three marks at the end may still turn into one.
        marks = len(text) - len(text.rstrip(_UNREADABLE))
        ready = len(text) - min(marks, 3)
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]
