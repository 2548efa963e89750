"""Parse adapter_config.json of PEFT: which modules have an adapter, of which rank and scale.

Every field of PEFT's LoraConfig is in exactly one of HANDLED, REFUSED and IGNORED; a test compares them with the
installed PEFT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.kits.hub.config_json import shown
from nash_mhc.storage.files import read_json

FILE = "adapter_config.json"
HANDLED = frozenset({
    "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
})  # fmt: skip
# Field -> the values that mean plain LoRA.
REFUSED: dict[str, tuple[Any, ...]] = {
    "task_type": (None, "CAUSAL_LM"), "bias": (None, "none"), "fan_in_fan_out": (None, False), "modules_to_save": (None, []),
    "use_dora": (None, False), "use_qalora": (None, False), "lora_bias": (None, False), "layer_replication": (None, []),
    "target_parameters": (None, []), "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None,),
    "megatron_config": (None,), "velora_config": (None,), "monteclora_config": (None,), "use_bdlora": (None,),
    "arrow_config": (None,), "kasa_config": (None,),
}  # fmt: skip
IGNORED = frozenset({
    # provenance
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version",
    # how PEFT runs and loads
    "inference_mode", "runtime_config", "megatron_core",
    # options of an initialization or method that another field enables
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    # about adapters on embedding and output, which are rejected by tensor name
    "ensure_weight_tying",
})  # fmt: skip
# These initializations subtract their first adapters from the base weights, so import needs the base weights.
CHANGES_BASE = ("pissa", "olora")
_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
REMEDY = "; merge it with PEFT (merge_and_unload) and import the merged model"


@dataclass(frozen=True)
class AdapterConfig:
    path: Path
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    init: str | None  # one of CHANGES_BASE; None: the base weights are unchanged
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers: frozenset[int]  # empty: all
    layers_pattern: tuple[str, ...]
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    @property
    def is_uniform(self) -> bool:
        """Whether all adapters have the same rank and scale, on unchanged base weights."""
        return not (self.rank_pattern or self.alpha_pattern or self.init)

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the scale of the product B A."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def excluded_by(self, module: str) -> str | None:
        """Return the field that leaves this module without an adapter; None if it has one."""
        if self.exclude_modules and _matches(self.exclude_modules, module):
            return "exclude_modules"
        if self.target_modules is None or self.target_modules == "all-linear":
            return None
        if not _matches(self.target_modules, module):
            return "target_modules"
        # PEFT checks layers only if target_modules matched the end of the name.
        if not self.layers or isinstance(self.target_modules, str) or module in self.target_modules:
            return None
        for pattern in self.layers_pattern or ("[^.]*",):
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return None if int(match[1]) in self.layers else "layers_to_transform"
        return "layers_pattern"


def _by_pattern(values: dict[str, Any], module: str, default: Any) -> Any:
    matching = (value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(matching, default)


def _matches(target: str | tuple[str, ...], module: str) -> bool:
    """Match a regular expression with the whole name, or a list with whole names or their ends."""
    if isinstance(target, str):
        return re.fullmatch(target, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in target)


def read_adapter_config(path: Path) -> AdapterConfig:
    """Parse the file; raise ConfigError naming a field that is invalid, unknown, or not plain LoRA."""
    values = read_json(path)
    if values.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type {shown(values.get('peft_type'))} is not LORA{REMEDY}")
    for name, value in values.items():
        if name in REFUSED and not _is_one_of(value, REFUSED[name]):
            raise ConfigError(f"{path}: {name} {shown(value)} is not supported{REMEDY}")
        if name not in REFUSED and name not in HANDLED | IGNORED and value not in (None, False, [], {}, ""):
            raise ConfigError(f"{path}: {name} {shown(value)} is unknown to this version of nash_mhc{REMEDY}")

    def field(name: str, is_valid: Callable[[Any], bool], expected: str, default: Any = None) -> Any:
        value = values.get(name)
        if value is None and default is not None:
            return default
        if not is_valid(value):
            raise ConfigError(f"{path}: {name} {shown(value)}: must be {expected}")
        return tuple(value) if isinstance(value, list) else value

    layers = field("layers_to_transform", _is_layers, "layer numbers", ())
    layers_pattern = field("layers_pattern", _is_regexes, "a regular expression or a list of them", ())
    init = values.get("init_lora_weights")
    init = init.lower() if isinstance(init, str) else init
    if not _is_one_of(init, (*CHANGES_BASE, *_KEEPS_BASE)):
        raise ConfigError(
            f"{path}: init_lora_weights {shown(init)} changes the base weights and cannot be computed again; save it with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or merge it with PEFT where it was "
            "trained (merge_and_unload) and import the merged model"
        )
    return AdapterConfig(
        path=path,
        rank=field("r", _is_rank, "an integer of at least 1"),
        alpha=float(field("lora_alpha", _is_positive, "a number above 0")),
        dropout=float(field("lora_dropout", lambda x: _is_number(x) and 0 <= x <= 0.9, "from 0 to 0.9", 0.0)),
        rslora=field("use_rslora", lambda x: isinstance(x, bool), "true or false", False),
        init=init if init in CHANGES_BASE else None,
        target_modules=field("target_modules", _is_target, "a list of names or a regular expression"),
        exclude_modules=field("exclude_modules", _is_target, "a list of names or a regular expression"),
        layers=frozenset(layers if isinstance(layers, tuple) else [layers]),
        layers_pattern=layers_pattern if isinstance(layers_pattern, tuple) else (layers_pattern,),
        rank_pattern=field("rank_pattern", _is_pattern_of(_is_rank), "a mapping from regular expressions to ranks", {}),
        alpha_pattern=field("alpha_pattern", _is_pattern_of(_is_positive), "a mapping from regular expressions to numbers", {}),
    )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Compare with ==, but distinguish 0 and False."""
    return any(type(value) is type(other) and value == other for other in values)


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # excludes nan and infinity


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_layers(value: Any) -> bool:
    return all(type(number) is int and number >= 0 for number in (value if isinstance(value, list) else [value]))


def _is_target(value: Any) -> bool:
    return value is None or _is_regex(value) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_regexes(value: Any) -> bool:
    return all(map(_is_regex, value)) if isinstance(value, list) else _is_regex(value)


def _is_pattern_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_is_regex(f"({key})") and is_valid(x) for key, x in value.items())


def _is_regex(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except (re.error, RecursionError, OverflowError):
        return False
