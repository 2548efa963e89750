"""What tests of settings share."""

from __future__ import annotations

import pytest

from nash_mhc.config import parsing
from nash_mhc.config.schema import ConfigError, RunConfig

# A value for every flag that must exist, different from what any preset would hold.
REQUIRED = {
    "--dataset": "corpus.txt", "--dataset-name": "v2", "--split": "part", "--tokenizer": "toks", "--batch-size": "7",
    "--seq-len": "320", "--total-steps": "777777", "--warmup-steps": "7", "--learning-rate": "7e-05", "--seed": "7",
    "--log-interval": "7", "--checkpoint-interval": "7", "--checkpoint-dir": "runs/seven", "--resume-from": "runs/six",
    "--num-workers": "7", "--worker-buffer-size": "7", "--mesh-data": "7", "--mesh-fsdp": "7", "--mesh-tp": "7",
    "--num-devices": "7", "--model-size": "small", "--platform": "cpu", "--grad-accum": "7", "--remat": "full",
    "--dtype": "bfloat16", "--eval-interval": "7", "--ema-decay": "0.77", "--max-grad-norm": "0.7",
    "--weight-decay": "0.07",
}  # fmt: skip


def leaf(config: RunConfig, path: str) -> object:
    if (key := parsing.keys(config.model_kind).get(path)) is not None:
        return key.of(config.to_dict())
    section, _, name = path.partition(".")  # a property
    return getattr(getattr(config, section), name)


def error(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsing.parse(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)
