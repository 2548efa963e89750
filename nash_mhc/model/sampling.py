"""Generate tokens: sampling, the context window, and batched decoding of several texts.

All texts of a batch begin at the start of the cache, so they share one position. A text whose prompt has ended
continues while the prompts of others are still being read. No text is padded, and none sees another.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ArchitectureConfig, ConfigError
from nash_mhc.model.architectures import architecture_of
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.parallel.sharding import for_compute

log = logging.getLogger(__name__)
_CHUNK = 64  # most tokens read or sampled in one call
MANY = 16  # a good `at_once` if no one watches; tokens after the end of a text are wasted
_NONE = -1  # stands for a token that cannot be sampled
_PROGRESS_S = 2.0  # seconds between progress messages


def keep_likely(logits_V: Float[Array, "V"], top_k: int, top_p: float) -> Float[Array, "V"]:
    """Set logits to -inf outside the `top_k` best (0: all), then outside the smallest set with mass `top_p`."""
    # By rank, not by threshold: of equal logits exactly k stay, the first ones, like argmax.
    order_V = jnp.argsort(-logits_V, stable=True)
    sorted_V = logits_V[order_V]
    if top_k > 0:
        sorted_V = jnp.where(jnp.arange(sorted_V.size) < top_k, sorted_V, -jnp.inf)
    if top_p < 1:
        mass_V = jax.nn.softmax(sorted_V)
        before_V = jnp.cumsum(mass_V) - mass_V  # 0 for the best token, so it always stays
        sorted_V = jnp.where(before_V < top_p, sorted_V, -jnp.inf)
    return jnp.zeros_like(logits_V).at[order_V].set(sorted_V)


def penalize_repetition(logits_V: Float[Array, "V"], seen_V: Bool[Array, "V"], penalty: float) -> Float[Array, "V"]:
    """Divide positive logits of seen tokens by `penalty`, and multiply negative ones by it."""
    return jnp.where(seen_V, jnp.where(logits_V > 0, logits_V / penalty, logits_V * penalty), logits_V)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def sample(
    logits_V: Float[Array, "V"], key: PRNGKeyArray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Int[Array, ""]:
    """Return one token id: the best at temperature 0, otherwise a sample with temperature, top-k and top-p."""
    if temperature == 0:
        return jnp.argmax(logits_V)
    # The best logit becomes 0 and the divisor has a floor, so no low temperature gives inf or NaN.
    scaled_V = (logits_V - jnp.max(logits_V)) / max(temperature, 1e-6)
    return jax.random.categorical(key, keep_likely(scaled_V, top_k, top_p))


class Sampling(NamedTuple):
    """Sampling parameters."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


def _sample_rows(
    logits_BV: Float[Array, "B V"],
    key: PRNGKeyArray,
    numbers_B: Int[Array, "B"],
    seen_BV: Bool[Array, "B V"] | None,
    how: Sampling,
) -> Int[Array, "B"]:
    """Return the token of each row, or _NONE if its logits are not finite.

    The random key depends on the token's number within its text, not on the row, so batching changes nothing.
    """
    is_finite_B = jnp.isfinite(logits_BV).all(axis=-1)
    if seen_BV is not None:
        logits_BV = jax.vmap(lambda logits, seen: penalize_repetition(logits, seen, how.repetition_penalty))(logits_BV, seen_BV)
    sample_row = lambda logits_V, i: sample(logits_V, jax.random.fold_in(key, i), how.temperature, how.top_k, how.top_p)
    return jnp.where(is_finite_B, jax.vmap(sample_row)(logits_BV, numbers_B), _NONE)


class DecodeState(NamedTuple):
    """The state of decoding on the device."""

    logits_BV: Float[Array, "B V"]  # of the next token
    cache: Any
    seen_BV: Bool[Array, "B V"] | None  # tokens seen so far, if repetition is penalized


def decode_chunk(
    model: Any,
    at: DecodeState,
    tokens_BT: Int[Array, "B T"],
    known_B: Int[Array, "B"],
    count: Int[Array, ""],
    numbers_B: Int[Array, "B"],
    key: PRNGKeyArray,
    how: Sampling,
) -> tuple[Int[Array, "B T"], DecodeState]:
    """Process `count` tokens of each text: the first `known_B` are given, the rest are sampled.

    Both counts are traced, so one program reads a chunk of a prompt, samples one token, or samples many without the
    host in between. `numbers_B` numbers the first token within the sampled tokens of its text (negative in a prompt).
    """
    decode = architecture_of(model.cfg).decode
    rows_B = jnp.arange(tokens_BT.shape[0])

    def body(t: Array, carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        tokens_BT, at = carry
        prompt_B = lax.dynamic_index_in_dim(tokens_BT, t, axis=1, keepdims=False)
        is_known_B = t < known_B
        sampled = lambda: _sample_rows(at.logits_BV, key, numbers_B + t, at.seen_BV, how).astype(prompt_B.dtype)
        token_B = jnp.where(is_known_B, prompt_B, lax.cond(jnp.all(is_known_B), lambda: prompt_B, sampled))
        seen_BV = None if at.seen_BV is None else at.seen_BV.at[rows_B, token_B].set(True)
        logits_BV, cache = decode(model, at.cache, token_B)
        return tokens_BT.at[:, t].set(token_B), DecodeState(logits_BV, cache, seen_BV)

    return lax.fori_loop(0, count, body, (tokens_BT, at))


_decode_chunk = jax.jit(decode_chunk, static_argnames="how", donate_argnames="at")  # updates the cache in place


def context_start(cfg: ArchitectureConfig, count: int, seq_len: int) -> int:
    """Return the index of the first token, of `count` so far, that the model sees when it predicts the next one.

    It is 0 until the cache is full. Then the cache restarts with its last half, rounded to the model's alignment, so
    that blocks hold the same tokens as before. The result depends on the count alone: a prompt and generated text of
    the same length continue alike.
    """
    half = seq_len // 2
    hop = seq_len - (half // cfg.alignment * cfg.alignment or half)
    return max(0, -(-(count - seq_len) // hop)) * hop


def generate_rows(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | np.ndarray],
    how: Sampling = Sampling(),
    *,
    seq_len: int,
    ends: Collection[int],
    max_tokens: int = 400,
    seed: int = 0,
    dtype: str = "float32",
    at_once: int = 1,
    is_done: Callable[[int], bool] = lambda row: False,
) -> Iterator[tuple[int, int]]:
    """Yield (index of the text, its next token), until each text has met one of `ends` (not yielded), has `max_tokens`
    new tokens, or `is_done`. Runs on the device that holds the model. The same arguments give the same tokens.

    A token sees at most `seq_len` tokens before it, from `context_start` on. Restarting the cache costs half a
    `seq_len` of steps every half `seq_len` of tokens, so a token costs about two steps however long the text is. A
    prompt usually starts with the tokenizer's begin token, like a document. Each call samples `at_once` tokens: 1
    streams every token; more is faster, as the device need not wait for the host.
    """
    texts = [[int(t) for t in prompt] for prompt in prompts]
    if not all(texts):
        raise ValueError("a prompt is empty; start a new document with the tokenizer's begin token")
    generated, active = [0] * len(texts), set(range(len(texts)))
    prompt_B = np.array([len(text) for text in texts], np.int32)
    key = jax.random.key(seed)
    model = for_compute(model, jnp.dtype(dtype))  # once, not for every token
    # Placed explicitly: otherwise JAX compiles once for the uncommitted new cache and again for the returned one.
    (device,) = jax.tree.leaves(model)[0].devices()

    def fresh() -> DecodeState:
        logits_BV = jnp.zeros((len(texts), model.cfg.vocab_size), jnp.float32)  # unused: the first token is known
        seen_BV = _seen(texts, model.cfg.vocab_size) if how.repetition_penalty != 1 else None
        cache = architecture_of(model.cfg).empty_cache(model.cfg, len(texts), seq_len, dtype)
        return jax.device_put(DecodeState(logits_BV, cache, seen_BV), device)

    at, start, read_to = fresh(), 0, 0
    last_message = time.monotonic()
    while active:
        known_to = min(len(texts[row]) for row in active)
        new_start = context_start(model.cfg, known_to, seq_len)
        if new_start != start:
            at, start, read_to = fresh(), new_start, new_start
        # The token that finds the cache full is the last before a restart, which discards what it writes.
        wanted = max(1, min(at_once, max(max_tokens - generated[row] for row in active)))
        last = min(known_to + wanted, start + seq_len + 1)
        count = min(_CHUNK, last - read_to)
        tokens_BT, known_B = np.zeros((len(texts), _CHUNK), np.int32), np.zeros(len(texts), np.int32)
        for row in active:  # rows of ended texts do not matter
            chunk = texts[row][read_to : read_to + count]
            tokens_BT[row, : len(chunk)], known_B[row] = chunk, len(chunk)
        inputs = jax.device_put((tokens_BT, known_B, np.int32(count), read_to - prompt_B))
        decoded_BT, at = _decode_chunk(model, at, *inputs, key, how)
        read_to += count
        if read_to <= known_to:
            if not any(generated) and read_to < known_to and time.monotonic() - last_message > _PROGRESS_S:
                at.logits_BV.block_until_ready()  # dispatch is asynchronous: the message must not run ahead
                last_message = time.monotonic()
                log.info(f"reading the prompt: {read_to - start:,} of {known_to - start:,} tokens ...")
            continue
        new_BT = np.asarray(decoded_BT)[:, count - (read_to - known_to) : count]
        for position, new_B in enumerate(new_BT.T, start=known_to):
            for row in [row for row in sorted(active) if len(texts[row]) == position]:
                token = _checked(int(new_B[row]))
                if token in ends:
                    active.remove(row)
                    continue
                texts[row].append(token)
                generated[row] += 1
                yield row, token
                if generated[row] == max_tokens or is_done(row):
                    active.remove(row)


def _checked(token: int) -> int:
    if token == _NONE:
        raise ConfigError(
            "the model's logits are not finite (NaN or infinite): its weights are damaged or its training has diverged; "
            "use an earlier checkpoint (--step) or another model"
        )
    return token


def _seen(texts: Sequence[Sequence[int]], vocab_size: int) -> Array:
    seen_BV = np.zeros((len(texts), vocab_size), bool)
    for row, text in enumerate(texts):
        seen_BV[row, [token for token in text if token < vocab_size]] = True
    return jnp.asarray(seen_BV)


def generate_tokens(
    model: LanguageModel, prompt_tokens: Sequence[int] | np.ndarray, how: Sampling = Sampling(), *, end: int, **options: Any
) -> Iterator[int]:
    """Yield the tokens of one text; `options` are those of `generate_rows`."""
    for _, token in generate_rows(model, [prompt_tokens], how, ends=(end,), **options):
        yield token
