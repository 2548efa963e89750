"""`hub check A B`: compare the logits of two models on the same text."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.tokenizer import with_begin
from nash_mhc.hub.config_json import has_only_our_code
from nash_mhc.hub.folder import CONFIG, is_hub_folder
from nash_mhc.hub.load import load, tokenizer_of

log = logging.getLogger(__name__)


def compare(a: str, b: str, text: str, count: int, *, trusted: bool) -> dict[str, Any]:
    """Compare two folders on the first `count` tokens of the text; `by` names the library that ran each."""
    tokenizer = tokenizer_of(a)
    tokens = np.array(with_begin(tokenizer, tokenizer.encode(text)[: count - 1].tolist()), np.int32)
    (logits_a, by_a), (logits_b, by_b) = (_logits(folder, tokens, trusted) for folder in (a, b))
    return {"tokens": len(tokens), "by": [by_a, by_b], **difference(logits_a, logits_b)}


def difference(a_TV: np.ndarray, b_TV: np.ndarray) -> dict[str, float]:
    """Return the largest difference of logits, the mean KL divergence, and how often both choose the same token."""
    if a_TV.shape != b_TV.shape:
        raise ConfigError(f"cannot compare models with vocabularies of {a_TV.shape[1]} and {b_TV.shape[1]} tokens")
    log_p, log_q = (_log_softmax(x_TV.astype(np.float64)) for x_TV in (a_TV, b_TV))
    return {
        "largest difference": float(np.abs(a_TV - b_TV).max()),
        "mean KL, nats": float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        "same choice": float((a_TV.argmax(-1) == b_TV.argmax(-1)).mean()),
    }


def _logits(folder: str, tokens: np.ndarray, trusted: bool) -> tuple[np.ndarray, str]:
    """Return float32 logits [T, V] and the library used: transformers for Hugging Face folders, if torch is there."""
    if is_hub_folder(folder):
        if importlib.util.find_spec("torch") is not None:
            return _logits_by_torch(folder, tokens, trusted), "transformers"
        log.info(f"{folder}: torch is not installed; running it with nash_mhc")
    loaded = load(folder)
    logits = jax.jit(lambda model, tokens_BT: model(tokens_BT))(loaded.model, jnp.asarray(tokens[None]))
    return np.asarray(logits[0]), "nash_mhc"


def _logits_by_torch(folder: str, tokens: np.ndarray, trusted: bool) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    values = json.loads((Path(folder) / CONFIG).read_text())
    trusted = trusted or has_only_our_code(Path(folder), values)
    if "auto_map" in values and not trusted:
        raise ConfigError(f"{folder}: the model needs to run code from the folder; allow it with --trust-remote-code")
    log.info(f"reading {folder} with transformers ...")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trusted).eval()
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].float().numpy()
    return logits


def _log_softmax(x_TV: np.ndarray) -> np.ndarray:
    x_TV = x_TV - x_TV.max(-1, keepdims=True)
    log_p: np.ndarray = x_TV - np.log(np.exp(x_TV).sum(-1, keepdims=True))
    return log_p
