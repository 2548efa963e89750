"""New tokens from a model, one by one: which are drawn, and how much of the text before them is seen.

Several texts are written at once: each begins at the cache's first place, so that all are at the same position, and one
whose prompt has ended goes on by itself while others are still being read. No text is padded, and none sees another.
"""

from __future__ import annotations

import functools
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

_CHUNK = 64  # tokens that are read or written in one call, at most
MANY = 16  # tokens to draw `at_once` where nobody watches; those after the end of a text are drawn in vain
_NONE = -1  # in the place of a token that cannot be drawn
_PATIENCE = 2.0  # seconds of silence that a reader of the terminal is asked for


def keep_likely(logits_V: Float[Array, "V"], top_k: int, top_p: float) -> Float[Array, "V"]:
    """Logits with -inf outside the `top_k` best (0: all),
    then outside the fewest of those whose mass reaches `top_p`."""
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


def repeated_less(logits_V: Float[Array, "V"], seen_V: Bool[Array, "V"], penalty: float) -> Float[Array, "V"]:
    """Logits of tokens that have come before divided by `penalty`, or times it where they are below 0."""
    return jnp.where(seen_V, jnp.where(logits_V > 0, logits_V / penalty, logits_V * penalty), logits_V)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def sample(
    logits_V: Float[Array, "V"], key: PRNGKeyArray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Int[Array, ""]:
    """One token id: at temperature 0 the best, otherwise a draw from softmax(logits / temperature),
    cut to the likely ones."""
    if temperature == 0:
        return jnp.argmax(logits_V)
    # The best at zero and a floor under the divisor: no temperature, however low, divides to inf or NaN.
    scaled_V = (logits_V - jnp.max(logits_V)) / max(temperature, 1e-6)
    return jax.random.categorical(key, keep_likely(scaled_V, top_k, top_p))


class Drawn(NamedTuple):
    """How a token is chosen."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


def _sample_rows(
    logits_BV: Float[Array, "B V"],
    key: PRNGKeyArray,
    numbers_B: Int[Array, "B"],
    seen_BV: Bool[Array, "B V"] | None,
    how: Drawn,
) -> Int[Array, "B"]:
    """The token of each row, or _NONE where its logits are not finite.

    A draw depends on its number in its own text, not on the row: alone it is the same.
    """
    is_finite_B = jnp.isfinite(logits_BV).all(axis=-1)
    if seen_BV is not None:
        logits_BV = jax.vmap(lambda logits, seen: repeated_less(logits, seen, how.repetition_penalty))(logits_BV, seen_BV)
    one = lambda logits_V, i: sample(logits_V, jax.random.fold_in(key, i), how.temperature, how.top_k, how.top_p)
    return jnp.where(is_finite_B, jax.vmap(one)(logits_BV, numbers_B), _NONE)


class Written(NamedTuple):
    """Where the texts stand on the device."""

    logits_BV: Float[Array, "B V"]  # of the token after those that were read
    cache: Any
    seen_BV: Bool[Array, "B V"] | None  # tokens that have come before, where repetition is penalized


def write_on(
    model: Any,
    at: Written,
    tokens_BT: Int[Array, "B T"],
    known_B: Int[Array, "B"],
    count: Int[Array, ""],
    numbers_B: Int[Array, "B"],
    key: PRNGKeyArray,
    how: Drawn,
) -> tuple[Int[Array, "B T"], Written]:
    """Reads `count` tokens of each text: the first `known` are given, each one after them is drawn.

    Neither count is part of the program: compiled once, this reads a chunk of a prompt, draws a single token, or many
    of them without the host in between. `numbers`: of the draw of the first token, had it not been known.
    """
    decode = architecture_of(model.cfg).decode
    rows_B = jnp.arange(tokens_BT.shape[0])

    def body(t: Array, carry: tuple[Array, Written]) -> tuple[Array, Written]:
        tokens_BT, at = carry
        given_B = lax.dynamic_index_in_dim(tokens_BT, t, axis=1, keepdims=False)
        is_known_B = t < known_B
        drawn = lambda: _sample_rows(at.logits_BV, key, numbers_B + t, at.seen_BV, how).astype(given_B.dtype)
        token_B = jnp.where(is_known_B, given_B, lax.cond(jnp.all(is_known_B), lambda: given_B, drawn))
        seen_BV = None if at.seen_BV is None else at.seen_BV.at[rows_B, token_B].set(True)
        logits_BV, cache = decode(model, at.cache, token_B)
        return tokens_BT.at[:, t].set(token_B), Written(logits_BV, cache, seen_BV)

    return lax.fori_loop(0, count, body, (tokens_BT, at))


_write_on = jax.jit(write_on, static_argnames="how", donate_argnames="at")  # the cache gets its new rows in place


def context_start(cfg: ArchitectureConfig, count: int, seq_len: int) -> int:
    """The first of `count` tokens that the prediction of the next one sees.

    All of them while the cache has room. When it is full, it begins anew with its last half, in multiples of the
    model's alignment, so that blocks hold the same tokens as before. The answer depends on the count alone: a text goes
    on in the same way whether it was a prompt or was generated.
    """
    half = seq_len // 2
    hop = seq_len - (half // cfg.alignment * cfg.alignment or half)
    return max(0, -(-(count - seq_len) // hop)) * hop


def generate_rows(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | np.ndarray],
    how: Drawn = Drawn(),
    *,
    seq_len: int,
    ends: Collection[int],
    max_tokens: int = 400,
    seed: int = 0,
    dtype: str = "float32",
    at_once: int = 1,
    is_done: Callable[[int], bool] = lambda row: False,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[int, int]]:
    """Yields (number of the text, its next token) until each has met one of `ends` (not yielded), has `max_tokens`, or
    `is_done`; on the one device that holds the model.

    Each token is predicted from the tokens before it, from `context_start` on: at most `seq_len`, and once the text is
    longer than that, more than half as many (the half rounded down to whole blocks). Beginning the cache anew costs
    half a `seq_len` of steps every half `seq_len` of tokens, so a token costs about two steps however long the text is.
    A document begins with the tokenizer's begin token, so a prompt usually does, too. The same arguments give the same
    tokens. `at_once` of them are drawn before they are handed out: one for a reader who watches; many are faster, since
    the device need not wait for the host after each. `say` hears of what takes long before the first token.
    """
    texts = [[int(t) for t in prompt] for prompt in prompts]
    if not all(texts):
        raise ValueError("the model needs a token to begin with; a new document begins with the tokenizer's begin token")
    made, going = [0] * len(texts), set(range(len(texts)))
    prompt_B = np.array([len(text) for text in texts], np.int32)
    key = jax.random.key(seed)
    model = for_compute(model, jnp.dtype(dtype))  # once, not for every token
    # Where the model lies, in so many words:
    # JAX would compile once for a cache without a place and again for the one returned.
    (device,) = jax.tree.leaves(model)[0].devices()

    def fresh() -> Written:
        logits_BV = jnp.zeros((len(texts), model.cfg.vocab_size), jnp.float32)  # the first token is always known
        seen_BV = _seen(texts, model.cfg.vocab_size) if how.repetition_penalty != 1 else None
        cache = architecture_of(model.cfg).empty_cache(model.cfg, len(texts), seq_len, dtype)
        return jax.device_put(Written(logits_BV, cache, seen_BV), device)

    at, start, read_to = fresh(), 0, 0
    said = time.monotonic()
    say("compiling ...")
    while going:
        upto = min(len(texts[row]) for row in going)
        now = context_start(model.cfg, upto, seq_len)
        if now != start:
            at, start, read_to = fresh(), now, now
        # The token that finds the cache full is the last: what it writes there is thrown away with the cache.
        wanted = max(1, min(at_once, max(max_tokens - made[row] for row in going)))
        last = min(upto + wanted, start + seq_len + 1)
        count = min(_CHUNK, last - read_to)
        tokens_BT, known_B = np.zeros((len(texts), _CHUNK), np.int32), np.zeros(len(texts), np.int32)
        for row in going:  # of one that has ended, anything
            part = texts[row][read_to : read_to + count]
            tokens_BT[row, : len(part)], known_B[row] = part, len(part)
        given = jax.device_put((tokens_BT, known_B, np.int32(count), read_to - prompt_B))
        written_BT, at = _write_on(model, at, *given, key, how)
        read_to += count
        if read_to <= upto:
            if not any(made) and read_to < upto and time.monotonic() - said > _PATIENCE:
                at.logits_BV.block_until_ready()  # otherwise these words would be ahead of the work
                said = time.monotonic()
                say(f"reading the prompt: {read_to - start:,} of {upto - start:,} tokens ...")
            continue
        drawn_BT = np.asarray(written_BT)[:, count - (read_to - upto) : count]
        for position, drawn_B in enumerate(drawn_BT.T, start=upto):
            for row in [row for row in sorted(going) if len(texts[row]) == position]:
                token = _checked(int(drawn_B[row]))
                if token in ends:
                    going.remove(row)
                    continue
                texts[row].append(token)
                made[row] += 1
                yield row, token
                if made[row] == max_tokens or is_done(row):
                    going.remove(row)


def _checked(token: int) -> int:
    if token == _NONE:
        raise ConfigError(
            "the model's logits are not finite (NaN or infinite), so no token can be drawn: its weights are damaged, or its "
            "training has diverged; use another model, or an earlier checkpoint with --step"
        )
    return token


def _seen(texts: Sequence[Sequence[int]], vocab_size: int) -> Array:
    seen_BV = np.zeros((len(texts), vocab_size), bool)
    for row, text in enumerate(texts):
        seen_BV[row, [token for token in text if token < vocab_size]] = True
    return jnp.asarray(seen_BV)


def generate_tokens(
    model: LanguageModel,
    prompt_tokens: Sequence[int] | np.ndarray,
    *,
    seq_len: int,
    end: int,
    max_tokens: int = 400,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: str = "float32",
    at_once: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[int]:
    """The tokens of one text; see `generate_rows`."""
    how = Drawn(temperature, top_k, top_p)
    for _, token in generate_rows(
        model, [prompt_tokens], how, seq_len=seq_len, ends=(end,), max_tokens=max_tokens, seed=seed, dtype=dtype,
        at_once=at_once, say=say,
    ):  # fmt: skip
        yield token
