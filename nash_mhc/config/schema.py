"""Every key of a run: frozen dataclasses, checked when they are built. No jax, no I/O.

A field carries its own help text and bounds, so the command line, `--help`, the YAML reader and the checks
all read the same declaration. Add a key here and it exists everywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from nash_mhc.config.capabilities import (
    DistillConfig,
    LoraConfig,
    ObjectiveConfig,
    PrecisionConfig,
    QuantizeConfig,
    TelemetryConfig,
)
from nash_mhc.config.data import TEMPLATE, DataConfig
from nash_mhc.config.fields import (
    REMOVED,
    ConfigError,
    Section,
    accepted_types,
    at_home,
    check_field,
    key,
    nearest_multiple,
    weighted_parts,
)
from nash_mhc.config.mesh import PLATFORMS, MeshConfig
from nash_mhc.config.model import ArchitectureConfig, Length, ModelConfig
from nash_mhc.config.recursive import RecursiveConfig
from nash_mhc.config.reservoir import ReservoirConfig

__all__ = [
    "ARCHITECTURES", "PLATFORMS", "TEMPLATE", "ArchitectureConfig", "ConfigError", "DataConfig", "DistillConfig", "Length",
    "LoraConfig", "MeshConfig", "ModelConfig", "ObjectiveConfig", "OptimConfig", "PrecisionConfig", "QuantizeConfig",
    "RecursiveConfig", "ReservoirConfig", "RunConfig", "Section", "TelemetryConfig", "TrainConfig",
    "accepted_types", "at_home", "check_field", "key", "nearest_multiple", "weighted_parts",
]  # fmt: skip


# What a layer makes on its way that the backward pass may find saved; `model/remat.py` knows what is meant.
KEEPABLE = ("qkv", "attention", "mixed", "output", "ffn-up", "ffn-down", "read", "coefficients")


@dataclass(frozen=True)
class OptimConfig(Section):
    section = "optim"

    learning_rate: float = key(1.2e-3, "peak learning rate of matrices at width 640; others follow by role and width", above=0)
    min_lr_ratio: float = key(0.05, "learning rate at the end, as a share of the peak", low=0, high=1)
    warmup_steps: int = key(25, "steps of linear warm-up", low=0)
    optimizer: str = key("adamw", "adamw, adam_atan2, muon (matrices by Muon, all else by AdamW), or one that was registered")
    freeze: str | None = key(
        None, "parameters that stay as they are: names as in parameters.txt or the first words of them, * for any, with commas"
    )
    train_only: str | None = key(None, "parameters that are trained, named likewise; all others stay as they are")
    schedule: str = key("cosine", "shape after the warm-up", choices=("cosine", "wsd", "constant"))
    decay_fraction: float = key(0.2, "share of the steps that wsd spends decaying at the end", low=0, high=1)
    weight_decay: float = key(0.1, "AdamW weight decay, on matrices only", low=0)
    b1: float = key(0.9, "AdamW first-moment decay", low=0, high=1)
    b2: float = key(0.95, "AdamW second-moment decay", low=0, high=1)
    eps: float = key(1e-8, "AdamW epsilon", above=0)
    max_grad_norm: float = key(1.0, "clip gradients to this global norm (0: never)", low=0)
    z_loss: float = key(0.0, "weight of the squared log-partition term", low=0)
    sparsity: float = key(0.0, "weight of the entropy of the scales' weights in the loss", low=0)
    ema_decay: float = key(0.0, "decay of the averaged copy of the weights (0: none is kept)", low=0, high=0.999999)


@dataclass(frozen=True)
class TrainConfig(Section):
    section = "train"

    total_steps: int = key(300, "optimizer steps of the whole run", low=1)
    epochs: float | None = key(
        None, "passes over the data, from which --total-steps follows (none: as many as that makes)", above=0, further="tuning"
    )
    patience: int = key(
        0, "end after this many evaluations in a row without a lower held-out loss (0: never)", low=0, further="tuning"
    )
    end_with: str = key(
        "auto",
        "the checkpoint that a run ends with, and that other commands take: the last, or the best by held-out loss (auto: the "
        "best where --lora-rank, --epochs or --patience is given)",
        choices=("auto", "last", "best"),
        further="tuning",
    )
    seed: int = key(0, "seed of the weights and of the data order", low=0, high=2**32 - 1)
    grad_accum: int = key(1, "forward passes gathered into one step", low=1)
    remat: str = key("none", "what the backward pass computes again", choices=("none", "dots", "full"))
    remat_keep: str | None = key(
        None,
        f"what it finds saved besides, to compute less again: some of {', '.join(KEEPABLE)}, with commas between",
        further="precision",
    )
    dtype: str = key(
        "auto", "compute dtype; auto is float32 on CPU, bfloat16 elsewhere", choices=("auto", "float32", "bfloat16")
    )
    matmul_dtype: str = key(
        "compute",
        "of the products with the feed-forward layers' and attention's weights: float8, which GPUs from Hopper on are faster "
        "with, or as computed",
        choices=("compute", "float8"),
        further="precision",
    )
    attention: str = key(
        "auto", "attention kernel; auto takes the platform's best", choices=("auto", "xla", "cudnn", "pallas", "splash")
    )
    deterministic: bool = key(
        True, "the same bits in every run, which a GPU does not give by itself; costs it memory, and speed where rows are long"
    )
    unroll: str = key(
        "auto",
        "layers one after the other, not in a loop: slower to compile, faster on a GPU (auto: on one)",
        choices=("auto", "yes", "no"),
    )
    log_interval: int = key(20, "steps between rows of metrics.jsonl", low=1)
    eval_interval: int = key(150, "steps between evaluations (0: only at the end)", low=0)
    eval_batches: int = key(16, "batches of one evaluation", low=1)
    checkpoint_interval: int = key(150, "steps between checkpoints (0: only at the end)", low=0)
    checkpoint_dir: str | None = key(
        None, "folder of the run; one that holds a run is continued (none: runs/SIZE-DATE-TIME)", path=True, remote=True
    )
    max_bad_steps: int = key(10, "stop after this many skipped steps in a row: no finite loss or gradients (0: never)", low=0)
    on_spike: str = key(
        "report", "what to do with a sudden rise of loss or gradient norm", choices=("report", "skip", "ignore")
    )
    spike_score: float = key(20.0, "robust standard deviations above the last steps' median that make a spike", above=0)
    stall_timeout: float = key(
        600.0, "seconds without progress after which the run names the process that holds it up, and leaves (0: never)", low=0
    )
    keep_last: int = key(3, "checkpoints to keep, the newest; the best by held-out loss is kept as well", low=1)
    keep_every: int = key(0, "also keep the checkpoints at multiples of this many steps (0: none)", low=0)
    resume: str = key(
        "auto",
        "go on from the folder's last whole checkpoint: if it has one, never, or not without",
        choices=("auto", "never", "must"),
    )
    resume_from: str | None = key(
        None,
        "folder of a run to go on with in another one: its weights, optimizer, place in the schedule and step count",
        path=True,
        remote=True,
    )
    init_from: str | None = key(
        None,
        "folder of a run or a Hugging Face model whose weights to start from, with a run's data where --dataset names none",
        path=True,
        remote=True,
    )
    init_step: int | None = key(None, "checkpoint of --init-from to take (none: its last)", low=0)
    wait_for_lock: float = key(
        0.0, "seconds to wait for --checkpoint-dir where another run still holds it (0: leave at once)", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume == "never" and self.resume_from is not None:
            raise ConfigError("--resume never starts from fresh weights; leave out --resume-from, or --resume")
        if self.resume_from is not None and self.init_from is not None:
            raise ConfigError(
                "--resume-from goes on with a run, --init-from starts another one from its weights; leave one of them out"
            )
        if unknown := [name for name in self._kept_names if name not in KEEPABLE]:
            raise ConfigError(f"train.remat_keep: there is no {unknown[0]!r}; there are {', '.join(KEEPABLE)}")
        if self.remat_keep is not None and self.remat == "none":
            raise ConfigError("train.remat_keep: --remat none keeps everything; leave it out, or set --remat dots or full")
        if self.init_step is not None and self.init_from is None:
            raise ConfigError("--init-step names a checkpoint of --init-from; give both, or leave it out")

    @property
    def _kept_names(self) -> list[str]:
        return [] if self.remat_keep is None else [name.strip() for name in self.remat_keep.split(",")]

    @property
    def kept(self) -> str:
        """What is kept for the backward pass, as an Execution has it: `dots`, `dots+ffn-up`."""
        return "+".join([self.remat, *([",".join(sorted(self._kept_names))] if self.remat_keep else [])])


# The configurations of all kinds of models that are known, by name.
ARCHITECTURES: dict[str, type[ArchitectureConfig]] = {
    kind.architecture: kind for kind in (ModelConfig, ReservoirConfig, RecursiveConfig)
}


def architecture_config(name: str) -> type[ArchitectureConfig]:
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"model_kind {name}: this process knows no such model; there are {', '.join(ARCHITECTURES)} (import the "
            "module that registers it)"
        )
    return ARCHITECTURES[name]


def section_class(of_run: dataclasses.Field[Any]) -> type[Section] | None:
    """Of a field of RunConfig; None for one that is no section. The model's is that of our own."""
    made = of_run.default_factory
    return made if isinstance(made, type) and issubclass(made, Section) else None


@dataclass(frozen=True)
class RunConfig:
    """A whole run. `model_size` names the preset that the other keys started from."""

    model_size: str = key("tiny", "preset that the other keys start from")
    model: ArchitectureConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        check_field("model_size", self.model_size, str, {})
        if self.optim.warmup_steps > self.train.total_steps:
            raise ConfigError(
                f"optim.warmup_steps {self.optim.warmup_steps} is more than train.total_steps {self.train.total_steps}; "
                f"lower --warmup-steps or raise --total-steps"
            )
        if self.lora.rank and self.optim.train_only is not None:
            raise ConfigError("--lora-rank trains adapters alone; leave out --train-only, or choose their --lora-targets")
        if self.lora.rank and self.quantize.weights is not None:
            raise ConfigError(
                "--quantize: adapters correct a model that is quantized already; quantize it in a run of its own, and name "
                "that one with --init-from, without --quantize"
            )
        if self.train.matmul_dtype == "float8" and not isinstance(self.model, ModelConfig):
            raise ConfigError(f"--matmul-dtype float8: only models of kind {ModelConfig.architecture} have such products")
        if self.train.matmul_dtype == "float8" and self.quantize.weights is not None:
            raise ConfigError(
                "--matmul-dtype float8: weights that --quantize has rounded would be rounded twice; leave one out"
            )
        sees_all = isinstance(self.model, RecursiveConfig) and not self.model.causal
        if sees_all and self.objective.name in ("next_token", "smoothed", "distill"):
            raise ConfigError(
                f"--no-model-causal: with --objective {self.objective.name}, every place would see its own answer; use "
                "--objective puzzle, or a causal model"
            )
        self.model.check_rows(self.data.seq_len)

    @property
    def model_kind(self) -> str:
        """The name of its model's architecture: which keys `model` has."""
        return self.model.architecture

    @property
    def reads_cache(self) -> bool:
        """Whether it learns from a teacher whose choices lie beside the rows."""
        return self.objective.name == "distill" and self.distill.teacher is None

    @property
    def ends_with_best(self) -> bool:
        """Whether the checkpoint with the lowest held-out loss is the run's, and not the last."""
        train = self.train
        tunes = bool(self.lora.rank or train.epochs is not None or train.patience)
        return train.end_with == "best" or (train.end_with == "auto" and tunes)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON or YAML; `from_dict` is the inverse."""
        values = dataclasses.asdict(self)
        return {"model_size": values.pop("model_size"), "model_kind": self.model_kind, **values}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RunConfig:
        sections = {f.name: f for f in dataclasses.fields(RunConfig)}
        built: dict[str, Any] = {}
        values = dict(values)
        model_kind = architecture_config(values.pop("model_kind", ModelConfig.architecture))
        for name, value in values.items():
            if name not in sections:
                raise ConfigError(f"unknown section {name!r}; there are {', '.join(sections)}")
            if (kind := section_class(sections[name])) is not None:
                if not isinstance(value, dict):
                    raise ConfigError(f"{name} must hold keys and values, not {value!r}")
                given = {k: v for k, v in value.items() if f"{name}.{k}" not in REMOVED}  # old runs wrote them down
                if name == "model":
                    kind = model_kind
                known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
                unknown = sorted(set(given) - known)
                if unknown:
                    raise ConfigError(f"unknown key {name}.{unknown[0]}; there are {', '.join(sorted(known))}")
                built[name] = kind(**given)
            else:
                built[name] = value
        return RunConfig(**built)
