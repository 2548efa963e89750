"""Named starting points: a complete configuration a size, as it stands. docs/presets.md has the exact counts."""

from __future__ import annotations

import dataclasses

from nash_mhc.config.schema import (
    ConfigError,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RecursiveConfig,
    ReservoirConfig,
    RunConfig,
    TelemetryConfig,
    TrainConfig,
    architecture_config,
)

# One rate for all: a parameter's role and width do the rest (`rates` in optim/roles.py).
_OPTIM = OptimConfig(learning_rate=3e-3, warmup_steps=200, min_lr_ratio=0.1)
# On an H200, `small` takes 8 ms for a token: so many, at every evaluation, are less than a hundredth of its time.
_TELEMETRY = TelemetryConfig(sample_tokens=32)
_NO_SAMPLES, _PUZZLE = TelemetryConfig(sample_tokens=0), ObjectiveConfig(name="puzzle")
_TRAIN = TrainConfig(total_steps=10_000, remat="dots", log_interval=10, eval_interval=500, checkpoint_interval=500)

_NASH_MHC: dict[str, RunConfig] = {
    # Learns the built-in stories on a laptop in three minutes; what it does not say here are the defaults of model.py.
    "tiny": RunConfig(
        model_size="tiny",
        model=ModelConfig(
            vocab_size=257, width=128, layers=2, heads=8, kv_heads=8, head_dim=16, ffn=384, window=32, rope_theta=10_000.0,
        ),
        train=TrainConfig(unroll="yes"),  # on a CPU, for two layers: 0.8 s more of compiling, a hundredth off every step
    ),
    "small": RunConfig(
        model_size="small",
        model=ModelConfig(
            vocab_size=65_536, width=640, layers=12, heads=10, kv_heads=10, head_dim=64, ffn=1792, window=512,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=2048), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
    "medium": RunConfig(
        model_size="medium",
        model=ModelConfig(
            vocab_size=65_536, width=1024, layers=14, heads=16, kv_heads=8, head_dim=64, ffn=2816, window=512,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=2048), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
    "big": RunConfig(
        model_size="big",
        model=ModelConfig(
            vocab_size=65_536, width=1536, layers=16, heads=12, kv_heads=12, head_dim=128, ffn=4096, window=512,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=2048), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
    "max": RunConfig(
        model_size="max",
        model=ModelConfig(
            vocab_size=65_536, width=1792, layers=18, heads=14, kv_heads=14, head_dim=128, ffn=4608, window=512,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=4096), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
    "1b": RunConfig(
        model_size="1b",
        model=ModelConfig(
            vocab_size=32_768, width=2048, layers=16, heads=16, kv_heads=16, head_dim=128, ffn=5504, window=512,
            rope_theta=500_000.0, tied_embeddings=False,
        ),
        data=DataConfig(batch_size=8, seq_len=4096), optim=_OPTIM, telemetry=_TELEMETRY,
        # On an H200, 7% (dense) and 5% off the step, for 1.3 GiB a row.
        train=dataclasses.replace(_TRAIN, remat_keep="ffn-up"),
    ),
    "3b": RunConfig(
        model_size="3b",
        model=ModelConfig(
            vocab_size=65_536, width=2816, layers=28, heads=22, kv_heads=22, head_dim=128, ffn=7680, window=512,
            rope_theta=500_000.0, tied_embeddings=False,
        ),
        data=DataConfig(batch_size=8, seq_len=4096), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
}  # fmt: skip

# As wide and as deep as the sizes of the same names above.
_RESERVOIR: dict[str, RunConfig] = {
    "tiny": RunConfig(
        model_size="tiny",
        model=ReservoirConfig(vocab_size=257, width=128, layers=2, units=256, ffn=384),
        optim=OptimConfig(learning_rate=2.4e-3), train=TrainConfig(unroll="yes"),
    ),
    "small": RunConfig(
        model_size="small",
        model=ReservoirConfig(
            vocab_size=65_536, width=640, layers=12, units=1024, ffn=1792, slowest_leak=0.001, heads=10, head_dim=64,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=2048), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
    "1b": RunConfig(
        model_size="1b",
        model=ReservoirConfig(
            vocab_size=32_768, width=2048, layers=16, units=3072, ffn=5504, slowest_leak=0.001, heads=16, head_dim=128,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=4096), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
}  # fmt: skip

_RECURSIVE: dict[str, RunConfig] = {
    "tiny": RunConfig(
        model_size="tiny",
        model=RecursiveConfig(vocab_size=257, width=128, layers=2, heads=8, head_dim=16, ffn=384),
    ),
    "small": RunConfig(
        model_size="small",
        model=RecursiveConfig(
            vocab_size=65_536, width=1024, layers=4, heads=16, head_dim=64, ffn=2816, rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=2048), optim=_OPTIM, train=_TRAIN, telemetry=_TELEMETRY,
    ),
    # Learns small Sudoku on two cores in a few minutes.
    "sudoku4": RunConfig(
        model_size="sudoku4",
        model=RecursiveConfig(
            vocab_size=6, width=64, layers=2, heads=4, head_dim=16, ffn=192, inner_cycles=2, outer_cycles=2, mixer="cells",
            cells=16, causal=False, most_passes=8,
        ),
        data=DataConfig(dataset="sudoku4", tokenizer="sudoku4", batch_size=64, seq_len=16), objective=_PUZZLE,
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=50, ema_decay=0.99, optimizer="muon"),
        train=TrainConfig(total_steps=800, log_interval=50, eval_interval=200, checkpoint_interval=200),
        telemetry=_NO_SAMPLES,
    ),
    # As large as TRM (arXiv 2510.04871), which needs an accelerator.
    "sudoku9": RunConfig(
        model_size="sudoku9",
        model=RecursiveConfig(
            vocab_size=11, width=512, layers=2, heads=8, head_dim=64, ffn=1536, inner_cycles=6, outer_cycles=3, mixer="cells",
            cells=81, causal=False,
        ),
        data=DataConfig(dataset="sudoku9", tokenizer="sudoku9", batch_size=768, seq_len=81), objective=_PUZZLE,
        # So much decay keeps every map small: what is applied twenty times must not stretch what it gets.
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=500, weight_decay=10.0, ema_decay=0.999, optimizer="muon"),
        train=TrainConfig(
            total_steps=12_000, log_interval=50, eval_interval=1000, checkpoint_interval=1000, eval_batches=2,
            unroll="yes",  # on an H200 94 ms a step instead of 185, and 9 s of compiling
        ),
        telemetry=_NO_SAMPLES,
    ),
}  # fmt: skip

_SIZES = {
    ModelConfig.architecture: _NASH_MHC,
    ReservoirConfig.architecture: _RESERVOIR,
    RecursiveConfig.architecture: _RECURSIVE,
}


def _of_kind(kind: str) -> dict[str, RunConfig]:
    """Of a kind that somebody has registered, the defaults of its keys are what there is."""
    known = architecture_config(kind)
    return _SIZES.get(kind) or {"tiny": RunConfig(model_size="tiny", model=known())}


def sizes(kind: str = ModelConfig.architecture) -> tuple[str, ...]:
    return tuple(_of_kind(kind))


def run(name: str = "tiny", kind: str = ModelConfig.architecture) -> RunConfig:
    """A whole run with the model of that size: what `--model-size` starts from."""
    known = _of_kind(kind)
    if name not in known:
        raise ConfigError(f"unknown model size {name!r} of {kind}; there are {', '.join(known)}")
    return known[name]


def model(name: str = "tiny") -> ModelConfig:
    """Its model alone."""
    found = run(name).model
    assert isinstance(found, ModelConfig)
    return found
