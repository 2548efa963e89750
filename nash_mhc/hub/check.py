"""`hub check A B`: whether two folders hold the same model, by what they predict for the same text."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.tokenizer import with_begin
from nash_mhc.hub.folder import CONFIG, is_hub_folder
from nash_mhc.hub.load import load, tokenizer_of
from nash_mhc.hub.nash_tensors import has_only_our_code


class Answer(NamedTuple):
    logits_TV: np.ndarray
    by: str  # what computed them


def answer(folder: str, tokens: np.ndarray, *, trusted: bool, say: Callable[[str], None]) -> Answer:
    """Logits after each token, in float32. A Hugging Face folder is asked through torch, where there is one."""
    if is_hub_folder(folder):
        if importlib.util.find_spec("torch") is not None:
            return Answer(_by_torch(folder, tokens, trusted, say), "transformers")
        say(f"{folder}: torch is not installed, so that our own reader answers for it")
    loaded = load(folder, say=say)
    logits = jax.jit(lambda model, tokens_BT: model(tokens_BT))(loaded.model, jnp.asarray(tokens[None]))
    return Answer(np.asarray(logits[0]), "nash_mhc")


def _by_torch(folder: str, tokens: np.ndarray, trusted: bool, say: Callable[[str], None]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    values = json.loads((Path(folder) / CONFIG).read_text())
    trusted = trusted or has_only_our_code(Path(folder), values)
    if "auto_map" in values and not trusted:
        raise ConfigError(f"{folder}: its model is code in the folder, which would be run; allow it with --trust-remote-code")
    say(f"reading {folder} with transformers ...")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trusted).eval()
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].float().numpy()
    return found


def _log_softmax(x_TV: np.ndarray) -> np.ndarray:
    x_TV = x_TV - x_TV.max(-1, keepdims=True)
    found: np.ndarray = x_TV - np.log(np.exp(x_TV).sum(-1, keepdims=True))
    return found


def compare(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Largest difference of two logits, mean KL divergence in nats, and how often both would choose the same token."""
    if one.shape != other.shape:
        raise ConfigError(f"one model has {one.shape[1]} tokens and the other {other.shape[1]}; they cannot be compared")
    log_p, log_q = (_log_softmax(x.astype(np.float64)) for x in (one, other))
    return {
        "largest difference": float(np.abs(one - other).max()),
        "mean KL, nats": float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        "same choice": float((one.argmax(-1) == other.argmax(-1)).mean()),
    }


def figures(a: str, b: str, text: str, count: int, *, trusted: bool, say: Callable[[str], None]) -> dict[str, Any]:
    tokenizer = tokenizer_of(a)
    tokens = np.array(with_begin(tokenizer, tokenizer.encode(text)[: count - 1].tolist()), np.int32)
    one, other = (answer(folder, tokens, trusted=trusted, say=say) for folder in (a, b))
    return {"tokens": len(tokens), "by": [one.by, other.by], **compare(one.logits_TV, other.logits_TV)}
