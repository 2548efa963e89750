"""What writing text takes, from where it lives: a folder's weights on one device, and new tokens from them."""

from __future__ import annotations

from nash_mhc.data.tokenizer import stream_text
from nash_mhc.hub.load import Loaded, load
from nash_mhc.model.sampling import MANY, Sampling, generate_rows, generate_tokens, keep_likely, sample

__all__ = ["MANY", "Loaded", "Sampling", "generate_rows", "generate_tokens", "keep_likely", "load", "sample", "stream_text"]
