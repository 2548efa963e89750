"""The whole run (`RunConfig`) and the checks between sections. No jax, no I/O.

The keys themselves are in sections.py, model.py and optim.py: frozen dataclasses, checked at construction.

The command line, `--help`, the YAML reader and the checks all read the same field: a key added here exists everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nash_mhc.config import kits
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
from nash_mhc.config.model import ArchitectureConfig, DivisibleSize, ModelConfig
from nash_mhc.config.optim import OptimConfig
from nash_mhc.config.recorded import is_unused
from nash_mhc.config.sections import (
    KEEPABLE,
    PLATFORMS,
    TEMPLATE,
    DataConfig,
    LoraConfig,
    MeshConfig,
    ObjectiveConfig,
    PrecisionConfig,
    TelemetryConfig,
    TrainConfig,
)

__all__ = [
    "ARCHITECTURES", "KEEPABLE", "KIT_SECTIONS", "PLATFORMS", "TEMPLATE", "ArchitectureConfig", "ConfigError",
    "DataConfig", "DivisibleSize", "LoraConfig", "MeshConfig", "ModelConfig", "ObjectiveConfig", "OptimConfig",
    "PrecisionConfig", "RunConfig", "Section", "TelemetryConfig", "TrainConfig", "accepted_types", "check_field",
    "expand_home", "key", "nearest_multiple", "weighted_parts",
]  # fmt: skip


S = TypeVar("S", bound=Section)

# Model configurations by kind.
ARCHITECTURES: Registry[type[ArchitectureConfig]] = Registry("model_kinds", {ModelConfig.architecture: ModelConfig})
# Sections of kits by name; those of the core are fields of RunConfig.
KIT_SECTIONS: Registry[type[Section]] = Registry("sections", {})


def architecture_config(name: str) -> type[ArchitectureConfig]:
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"model_kind {name}: unknown; choose from {', '.join(ARCHITECTURES)}, or load the kit (--kit) or the module that "
            "registers it"
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

    model_size: str = key("tiny", "preset of model size and training settings")
    kit: str | None = key(None, "plugin folders (kits) to load, comma-separated")
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
            raise ConfigError(
                "--lora-rank trains only the adapters; leave out --train-only (--lora-targets chooses the adapted matrices)"
            )
        if self.train.matmul_dtype == "float8" and not isinstance(self.model, ModelConfig):
            raise ConfigError(f"--matmul-dtype float8: only --model-kind {ModelConfig.architecture} supports it; leave it out")
        self.model.check_rows(self.data.seq_len)
        for section in (self.model, *self.of_kits):
            section.check_run(self)

    def section(self, kind: type[S]) -> S:
        """Return a kit's section by its class; the defaults if nothing was set."""
        return next((section for section in self.of_kits if type(section) is kind), kind())

    def with_section(self, section: Section) -> RunConfig:
        """Return the same run with this section of a kit replaced."""
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
    def resizable(self) -> tuple[str, ...]:
        """Return the sections whose sizes the user may change: not the model's, if the run starts from weights."""
        return ("data", "model") if self.train.init_from is None and self.train.resume_from is None else ("data",)

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

    def recorded(self) -> dict[str, Any]:
        """Return `to_dict` without the sections of kits that the run does not use, to be read without those kits."""
        used = lambda kind: self.section(kind) != kind() or kind.of_objective == self.objective.name
        unused = [name for name, kind in KIT_SECTIONS.items() if not used(kind)]
        return {name: value for name, value in self.to_dict().items() if name not in unused}

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
            elif not is_unused(name, value):
                raise missing_section(name, [*plain, *known])
        of_kits = tuple(built.pop(name) for name in KIT_SECTIONS if name in built)
        return RunConfig(**built, of_kits=of_kits)


def missing_section(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a section that the core and the installed kits do not have."""
    return ConfigError(
        f"unknown section {name!r}: if it is of a kit, the kit is missing (restore nash_mhc/kits/{name}, or give its folder "
        f"with --kit); choose from {', '.join(known)}"
    )


def _section_of(name: str, kind: type[S], value: Any) -> S:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must contain keys and values, not {value!r}")
    given = {k: v for k, v in value.items() if f"{name}.{k}" not in REMOVED}  # old runs wrote them down
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"unknown key {name}.{unknown[0]}; choose from {', '.join(sorted(known))}")
    return kind(**given)
