"""adapter_config.json of PEFT: which modules have an adapter, its rank and scale, and what the base weights are.

Every field of PEFT's LoraConfig is in exactly one of HANDLED, REFUSED and IGNORED; a test compares them with the
installed PEFT.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.json_files import read_json

FILE = "adapter_config.json"
HANDLED = frozenset({
    "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
})  # fmt: skip
# Field -> the values that keep plain LoRA plain.
REFUSED: dict[str, tuple[Any, ...]] = {
    "task_type": (None, "CAUSAL_LM"), "bias": (None, "none"), "fan_in_fan_out": (None, False), "modules_to_save": (None, []),
    "use_dora": (None, False), "use_qalora": (None, False), "lora_bias": (None, False), "layer_replication": (None, []),
    "target_parameters": (None, []), "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None,),
    "megatron_config": (None,), "velora_config": (None,), "monteclora_config": (None,), "use_bdlora": (None,),
    "arrow_config": (None,), "kasa_config": (None,),
}  # fmt: skip
IGNORED = frozenset({
    # where the files come from
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version",
    # how PEFT runs and loads
    "inference_mode", "runtime_config", "megatron_core",
    # options of an initialization or method that another field switches on
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    # about adapters on the embedding and the output, which are refused by their tensors' names
    "ensure_weight_tying",
})  # fmt: skip
# These initializations subtract their first adapters from the base weights, so those are needed to import them.
OF_BASE = ("pissa", "olora")
_OF_ADAPTERS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
REMEDY = "; merge it with PEFT (merge_and_unload) and import the merged model"


@dataclass(frozen=True)
class AdapterConfig:
    path: Path
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    init: str | None  # one of OF_BASE; None: the base weights are used unchanged
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers: frozenset[int]  # empty: all
    layers_pattern: tuple[str, ...]
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    @property
    def is_uniform(self) -> bool:
        """Whether all adapters have one rank and one scale, on unchanged base weights."""
        return not (self.rank_pattern or self.alpha_pattern or self.init)

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def excluded_by(self, module: str) -> str | None:
        """The field that leaves this module without an adapter; None: the module has one."""
        if self.exclude_modules and _matches(self.exclude_modules, module):
            return "exclude_modules"
        if self.target_modules in (None, "all-linear"):
            return None
        assert self.target_modules is not None
        if not _matches(self.target_modules, module):
            return "target_modules"
        # PEFT looks at layers only where a module is named by its end.
        if not self.layers or isinstance(self.target_modules, str) or module in self.target_modules:
            return None
        for pattern in self.layers_pattern or ("[^.]*",):
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return None if int(found[1]) in self.layers else "layers_to_transform"
        return "layers_pattern"


def _by_pattern(values: dict[str, Any], module: str, default: Any) -> Any:
    found = (value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _matches(wanted: str | tuple[str, ...], module: str) -> bool:
    """A text is a regular expression for the whole name; a list has whole names or their ends."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def read_adapter_config(path: Path) -> AdapterConfig:
    """ConfigError names a field that is not understood, or that asks for more than plain LoRA."""
    values = read_json(path)
    if values.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type {_short(values.get('peft_type'))} is not LORA{REMEDY}")
    for name, value in values.items():
        if name in REFUSED and not _is_in(value, REFUSED[name]):
            raise ConfigError(f"{path}: {name} {_short(value)} is more than plain LoRA{REMEDY}")
        if name not in REFUSED and name not in HANDLED | IGNORED and value not in (None, False, [], {}, ""):
            raise ConfigError(f"{path}: {name} {_short(value)} is not known to this version of nash_mhc{REMEDY}")
    return _parsed(path, values)


def _parsed(path: Path, values: dict[str, Any]) -> AdapterConfig:
    def value(name: str, is_valid: Callable[[Any], bool], wanted: str, default: Any = None) -> Any:
        found = values.get(name)
        if found is None and default is not None:
            return default
        if not is_valid(found):
            raise ConfigError(f"{path}: {name} {_short(found)}: must be {wanted}")
        return found

    def names(name: str, *, is_regex: bool) -> str | tuple[str, ...] | None:
        """A list, or a text, which may be a regular expression for the whole name."""
        wanted = "a list of names" + " or a regular expression" * is_regex
        is_valid = lambda x: x is None or _is_names(x) or (isinstance(x, str) and (not is_regex or _is_regex(x)))
        found = value(name, is_valid, wanted)
        return tuple(found) if isinstance(found, list) else found

    def pattern(name: str, is_valid: Callable[[Any], bool], wanted: str) -> Any:
        is_mapping = lambda x: isinstance(x, dict) and all(_is_regex(f"({key})") and is_valid(y) for key, y in x.items())
        return value(name, is_mapping, f"a mapping from regular expressions to {wanted}", {})

    layers = values.get("layers_to_transform")
    if not (layers is None or _is_whole(layers) or (isinstance(layers, list) and all(map(_is_whole, layers)))):
        raise ConfigError(f"{path}: layers_to_transform {_short(layers)}: must be layer numbers")
    layers_pattern = names("layers_pattern", is_regex=False) or ()
    layers_pattern = (layers_pattern,) if isinstance(layers_pattern, str) else layers_pattern
    if not all(_is_regex(found) for found in layers_pattern):
        raise ConfigError(f"{path}: layers_pattern {_short(layers_pattern)}: must be regular expressions")
    return AdapterConfig(
        path=path,
        rank=value("r", _is_rank, "a whole number of at least 1"),
        alpha=float(value("lora_alpha", lambda x: _is_number(x) and x > 0, "a number above 0")),
        dropout=float(value("lora_dropout", lambda x: _is_number(x) and 0 <= x <= 0.9, "from 0 to 0.9", 0.0)),
        rslora=value("use_rslora", lambda x: isinstance(x, bool), "true or false", False),
        init=_init(path, values.get("init_lora_weights")),
        target_modules=names("target_modules", is_regex=True),
        exclude_modules=names("exclude_modules", is_regex=True),
        layers=frozenset(layers if isinstance(layers, list) else [] if layers is None else [layers]),
        layers_pattern=layers_pattern,
        rank_pattern=pattern("rank_pattern", _is_rank, "ranks of at least 1"),
        alpha_pattern=pattern("alpha_pattern", lambda x: _is_number(x) and x > 0, "numbers above 0"),
    )


def _init(path: Path, value: Any) -> str | None:
    said = value.lower() if isinstance(value, str) else value
    if isinstance(said, str) and said in OF_BASE:
        return said
    if not _is_in(said, _OF_ADAPTERS):
        raise ConfigError(
            f"{path}: init_lora_weights {_short(value)} belongs to base weights that were changed, and cannot be computed "
            "again; save it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or merge it with PEFT "
            "where it was trained (merge_and_unload) and import the merged model"
        )
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """As ==, but 0 is not False."""
    return any(type(value) is type(other) and value == other for other in values)


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # neither nan nor infinite


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True
