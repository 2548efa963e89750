"""Every key of a run: frozen dataclasses, checked at construction. No jax, no I/O.

The command line, `--help`, the YAML reader and the checks all read the same field: a key added here exists everywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nash_mhc.config import kits
from nash_mhc.config.capabilities import (
    LoraConfig,
    ObjectiveConfig,
    PrecisionConfig,
    TelemetryConfig,
)
from nash_mhc.config.data import TEMPLATE, DataConfig
from nash_mhc.config.fields import (
    REMOVED,
    ConfigError,
    Section,
    accepted_types,
    check_field,
    expand_home,
    key,
    nearest_multiple,
    weighted_parts,
)
from nash_mhc.config.kits import Registry
from nash_mhc.config.mesh import PLATFORMS, MeshConfig
from nash_mhc.config.model import ArchitectureConfig, Length, ModelConfig

__all__ = [
    "ARCHITECTURES",
    "KIT_SECTIONS",
    "PLATFORMS",
    "TEMPLATE",
    "ArchitectureConfig",
    "ConfigError",
    "DataConfig",
    "Length",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "PrecisionConfig",
    "RunConfig",
    "Section",
    "TelemetryConfig",
    "TrainConfig",
    "accepted_types",
    "check_field",
    "expand_home",
    "key",
    "nearest_multiple",
    "weighted_parts",
]  # fmt: skip


S = TypeVar("S", bound=Section)

# Activations that --remat-keep can save for the backward pass; `model/remat.py` implements them.
KEEPABLE = ("qkv", "attention", "mixed", "output", "ffn-up", "ffn-down", "read", "coefficients")


@dataclass(frozen=True)
class OptimConfig(Section):
    section = "optim"

    learning_rate: float = key(
        1.2e-3, "peak learning rate of matrices at width 640; other parameters follow by role and width", above=0
    )
    min_lr_ratio: float = key(0.05, "final learning rate as a share of the peak", low=0, high=1)
    warmup_steps: int = key(25, "steps of linear warm-up", low=0)
    optimizer: str = key(
        "adamw", "adamw, adam_atan2, muon (Muon for matrices, AdamW for the rest), or a registered optimizer", seam="optimizers"
    )
    freeze: str | None = key(
        None, "parameters not to train, comma-separated: names from parameters.txt or prefixes of them; * matches anything"
    )
    train_only: str | None = key(None, "parameters to train, in the same form; all others are frozen")
    schedule: str = key("cosine", "learning rate schedule after the warm-up", choices=("cosine", "wsd", "constant"))
    decay_fraction: float = key(0.2, "share of the steps in which wsd decays, at the end", low=0, high=1)
    weight_decay: float = key(0.1, "weight decay of AdamW, on matrices only", low=0)
    b1: float = key(0.9, "decay of AdamW's first moment", low=0, high=1)
    b2: float = key(0.95, "decay of AdamW's second moment", low=0, high=1)
    eps: float = key(1e-8, "epsilon of AdamW", above=0)
    max_grad_norm: float = key(1.0, "clip gradients to this global norm (0: no clipping)", low=0)
    z_loss: float = key(0.0, "weight of the squared log-partition term in the loss", low=0)
    sparsity: float = key(0.0, "weight of the scales' entropy in the loss", low=0)
    ema_decay: float = key(0.0, "decay of the averaged weights (0: no averaging)", low=0, high=0.999999)


@dataclass(frozen=True)
class TrainConfig(Section):
    section = "train"

    total_steps: int = key(300, "optimizer steps of the whole run", low=1)
    epochs: float | None = key(None, "passes over the data; sets --total-steps", above=0, further="tuning")
    patience: int = key(
        0, "stop after this many evaluations in a row without a lower held-out loss (0: never)", low=0, further="tuning"
    )
    end_with: str = key(
        "auto",
        "checkpoint a run ends with: last, or best by held-out loss (auto: best with --lora-rank, --epochs or --patience)",
        choices=("auto", "last", "best"),
        further="tuning",
    )
    seed: int = key(0, "seed of the weights and of the data order", low=0, high=2**32 - 1)
    grad_accum: int = key(1, "microbatches per step (gradient accumulation)", low=1)
    remat: str = key(
        "none",
        "activations to recompute in the backward pass: none, all but matmul results (dots), or all (full)",
        choices=("none", "dots", "full"),
    )
    remat_keep: str | None = key(
        None,
        f"extra activations to save under remat, comma-separated: {', '.join(KEEPABLE)}",
        further="precision",
    )
    dtype: str = key("auto", "compute dtype; auto: float32 on CPU, bfloat16 elsewhere", choices=("auto", "float32", "bfloat16"))
    matmul_dtype: str = key(
        "compute",
        "dtype of attention and MLP matmuls: `compute` (the compute dtype) or `float8` (faster on Hopper and newer)",
        choices=("compute", "float8"),
        further="precision",
    )
    attention: str = key(
        "auto", "attention kernel; auto: the fastest on this platform", choices=("auto", "xla", "cudnn", "pallas", "splash")
    )
    deterministic: bool = key(True, "give the same bits in every run; costs a GPU some memory, and speed for long sequences")
    unroll: str = key(
        "auto",
        "unroll the layers instead of scanning over them: slower to compile, faster on a GPU (auto: on one GPU)",
        choices=("auto", "yes", "no"),
    )
    log_interval: int = key(20, "steps between rows of metrics.jsonl", low=1)
    eval_interval: int = key(150, "steps between evaluations (0: only at the end)", low=0)
    eval_batches: int = key(16, "batches per evaluation", low=1)
    checkpoint_interval: int = key(150, "steps between checkpoints (0: only at the end)", low=0)
    checkpoint_dir: str | None = key(
        None, "run directory; an existing run is resumed (none: runs/SIZE-DATE-TIME)", path=True, remote=True
    )
    max_bad_steps: int = key(10, "stop after this many steps in a row without finite loss and gradients (0: never)", low=0)
    on_spike: str = key(
        "report", "what to do about a sudden rise of loss or gradient norm", choices=("report", "skip", "ignore")
    )
    spike_score: float = key(20.0, "robust standard deviations above the median of recent steps that count as a spike", above=0)
    stall_timeout: float = key(
        600.0, "seconds without progress after which the run names the process that hangs and exits (0: never)", low=0
    )
    keep_last: int = key(3, "newest checkpoints to retain; the best by held-out loss is retained too", low=1)
    keep_every: int = key(0, "also retain checkpoints at multiples of this many steps (0: none)", low=0)
    resume: str = key(
        "auto",
        "resume from the latest complete checkpoint: if there is one (auto), never, or fail without one (must)",
        choices=("auto", "never", "must"),
    )
    resume_from: str | None = key(
        None,
        "run directory to continue in another one, with weights, optimizer, schedule and step count",
        path=True,
        remote=True,
    )
    init_from: str | None = key(
        None,
        "run directory or Hugging Face folder with the initial weights; without --dataset, also a run's data",
        path=True,
        remote=True,
    )
    init_step: int | None = key(None, "checkpoint of --init-from to use (none: the last)", low=0)
    wait_for_lock: float = key(0.0, "seconds to wait if another run uses --checkpoint-dir (0: exit at once)", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume == "never" and self.resume_from is not None:
            raise ConfigError("--resume never starts from fresh weights; leave out --resume-from, or --resume")
        if self.resume_from is not None and self.init_from is not None:
            raise ConfigError("--resume-from resumes a run, --init-from starts a new one from its weights; give one of them")
        if unknown := [name for name in self._kept_names if name not in KEEPABLE]:
            raise ConfigError(f"train.remat_keep: unknown activation {unknown[0]!r}; choose from {', '.join(KEEPABLE)}")
        if self.remat_keep is not None and self.remat == "none":
            raise ConfigError("train.remat_keep: --remat none saves everything; leave it out, or set --remat dots or full")
        if self.init_step is not None and self.init_from is None:
            raise ConfigError("--init-step needs --init-from, whose checkpoint it names; give both, or leave it out")

    @property
    def _kept_names(self) -> list[str]:
        return [] if self.remat_keep is None else [name.strip() for name in self.remat_keep.split(",")]

    @property
    def kept(self) -> str:
        """Return the remat choice with the extra saved activations: `dots`, `dots+ffn-up`."""
        return "+".join([self.remat, *([",".join(sorted(self._kept_names))] if self.remat_keep else [])])


# Model configurations by kind.
ARCHITECTURES: Registry[type[ArchitectureConfig]] = Registry("model_kinds", {ModelConfig.architecture: ModelConfig})
# Sections of kits by name; those of the core are fields of RunConfig.
KIT_SECTIONS: Registry[type[Section]] = Registry("sections", {})


def architecture_config(name: str) -> type[ArchitectureConfig]:
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"model_kind {name}: unknown; there are {', '.join(ARCHITECTURES)} (load its kit with --kit, or import the "
            "module that registers it)"
        )
    return ARCHITECTURES[name]


def section_classes(model_kind: str = ModelConfig.architecture) -> dict[str, type[Section]]:
    """Return every section by name: the fields of RunConfig that are sections, then those of kits."""
    factories = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}
    ours: dict[str, Any] = {name: kind for name, kind in factories.items() if kind is not dataclasses.MISSING}
    if taken := [name for name in KIT_SECTIONS if name in factories]:
        raise ConfigError(f"a kit has a section named {taken[0]}, which is a section of the core; rename the kit's section")
    return ours | {"model": architecture_config(model_kind)} | dict(KIT_SECTIONS)


@dataclass(frozen=True)
class RunConfig:
    """A whole run. `model_size` names the preset that the other keys started from."""

    model_size: str = key("tiny", "preset to start from")
    kit: str | None = key(None, "kit folders outside of the package to load, separated by commas")
    model: ArchitectureConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    of_kits: tuple[Section, ...] = ()  # kit sections that differ from their defaults: see `section`

    def __post_init__(self) -> None:
        check_field("model_size", self.model_size, str, {})
        check_field("kit", self.kit, str | None, {})
        changed = [section for section in self.of_kits if section != type(section)()]
        object.__setattr__(self, "of_kits", tuple(sorted(changed, key=lambda section: section.section)))
        if self.optim.warmup_steps > self.train.total_steps:
            raise ConfigError(
                f"optim.warmup_steps {self.optim.warmup_steps} is more than train.total_steps {self.train.total_steps}; "
                f"lower --warmup-steps or raise --total-steps"
            )
        if self.lora.rank and self.optim.train_only is not None:
            raise ConfigError("--lora-rank trains adapters alone; leave out --train-only, or choose their --lora-targets")
        if self.train.matmul_dtype == "float8" and not isinstance(self.model, ModelConfig):
            raise ConfigError(f"--matmul-dtype float8: only models of kind {ModelConfig.architecture} have such products")
        self.model.check_rows(self.data.seq_len)
        for section in (self.model, *self.of_kits):
            section.check_run(self)

    def section(self, kind: type[S]) -> S:
        """Return a kit's section by its class; the defaults if nothing was set."""
        return next((section for section in self.of_kits if type(section) is kind), kind())

    def with_section(self, section: Section) -> RunConfig:
        """Return the same run with another section of a kit."""
        others = tuple(other for other in self.of_kits if type(other) is not type(section))
        return dataclasses.replace(self, of_kits=(*others, section))

    def with_next_token(self) -> RunConfig:
        """Return the same run with the default objective, without the sections of its own one."""
        others = tuple(section for section in self.of_kits if section.of_objective is None)
        return dataclasses.replace(self, objective=ObjectiveConfig(), of_kits=others)

    @property
    def model_kind(self) -> str:
        """Return the name of the model's architecture, which decides the keys of `model`."""
        return self.model.architecture

    @property
    def ends_with_best(self) -> bool:
        """Return whether the run ends with its best checkpoint by held-out loss instead of the last."""
        train = self.train
        tunes = bool(self.lora.rank or train.epochs is not None or train.patience)
        return train.end_with == "best" or (train.end_with == "auto" and tunes)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values for JSON or YAML; `from_dict` is the inverse."""
        values = dataclasses.asdict(dataclasses.replace(self, of_kits=()))
        del values["of_kits"]
        of_kits = {name: dataclasses.asdict(self.section(kind)) for name, kind in KIT_SECTIONS.items()}  # type: ignore[call-overload]
        return {"model_size": values.pop("model_size"), "model_kind": self.model_kind, **values, **of_kits}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RunConfig:
        values = dict(values)
        if isinstance(folders := values.get("kit"), str):
            kits.use(folders, recorded=True)
        known = section_classes(values.pop("model_kind", ModelConfig.architecture))
        plain = [f.name for f in dataclasses.fields(RunConfig) if f.name not in known and f.name != "of_kits"]
        built: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                built[name] = _section_of(name, known[name], value)
            elif name in plain:
                built[name] = value
            else:
                raise ConfigError(f"unknown section {name!r}; there are {', '.join([*plain, *known])}")
        of_kits = tuple(built.pop(name) for name in KIT_SECTIONS if name in built)
        return RunConfig(**built, of_kits=of_kits)


def _section_of(name: str, kind: type[S], value: Any) -> S:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must hold keys and values, not {value!r}")
    given = {k: v for k, v in value.items() if f"{name}.{k}" not in REMOVED}  # old runs wrote them down
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"unknown key {name}.{unknown[0]}; there are {', '.join(sorted(known))}")
    return kind(**given)
