"""Generate docs/configuration.md: `python -m nash_mhc.config.reference > docs/configuration.md`; a test compares it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nash_mhc.config import presets
from nash_mhc.config.help import TITLES
from nash_mhc.config.keys import OURS, SMALL, Key, further, keys
from nash_mhc.config.schema import ARCHITECTURES, RunConfig

COMMAND = "python -m nash_mhc.config.reference > docs/configuration.md"

# Keys that may have no value and have one by default.
OPTIONAL = " and ".join(
    f"`{path}`" for path, key in keys().items() if type(None) in key.kinds and key.of(presets.run().to_dict()) is not None
)

_BEGINNING = f"""\
# Configuration

This page lists every key of a run. It is generated from the declarations in `config/`; do not edit it:

```
{COMMAND}
```

Set a key in one of three ways. If it is set more than once, the last setting on the command line wins:

```
python -m nash_mhc.train --batch-size 32                  # a flag
python -m nash_mhc.train data.batch_size=32               # the key; batch_size=32 also works
python -m nash_mhc.train --config run.yaml                # a file, see below
python -m nash_mhc.train --model-size small --print-config   # print every key, its value and its origin
```

`--print-config` prints such a file. Sections are nested; keys that are missing have their defaults:

```yaml
model_size: small
data:
  batch_size: 32
optim:
  learning_rate: 2e-3
```

Rules for all keys:

- A boolean key also has a flag that sets it to false: `--no-deterministic`.
- `none` unsets a key. Keys with the default `none`, and {OPTIONAL}, may be unset.
- Integers may be written as `1e4`, and flags with underscores (`--batch_size`).
- An unknown flag or key, or a value out of range, ends the command with one line and exit code 2.
- Defaults are those of `--model-size {RunConfig.model_size}`. For other sizes, see [below](#defaults-of-other-sizes).
"""


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _limits(key: Key) -> str:
    """Return the bounds or choices of a value, as the end of a sentence."""
    of = key.metadata
    if of.get("choices"):
        return f"; one of {', '.join(f'`{choice}`' for choice in of['choices'])}"
    words = [f"at least {_value(of['low'])}"] * (of.get("low") is not None and not of.get("axis"))
    words += [f"above {_value(of['above'])}"] * (of.get("above") is not None)
    words += [f"at most {_value(of['high'])}"] * (of.get("high") is not None)
    return f"; {', '.join(words)}" if words else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _section(name: str, title: str, about: str = "", kind: str = OURS) -> str:
    defaults = presets.run(kind=kind).to_dict()
    rows = [
        (f"`{key.path}`", f"`{key.flag}`", f"`{_value(key.of(defaults))}`", f"{key.help}{_limits(key)}")
        for key in keys(kind).values()
        if key.section == name
    ]
    return f"## {title}\n\n{about}{_table(('key', 'flag', 'default', 'meaning'), rows)}\n"


def _other_sizes() -> str:
    """Return the table of keys that differ between presets. Model shapes are in docs/presets.md."""
    sizes = {name: presets.run(name).to_dict() for name in presets.sizes()}
    differing = [
        key
        for key in keys().values()
        if key.path != "model_size" and len({_value(key.of(values)) for values in sizes.values()}) > 1
    ]
    rows = [(f"`{key.path}`", *(f"`{_value(key.of(values))}`" for values in sizes.values())) for key in differing]
    note = (
        "With `--tokenizer`, `model.vocab_size` is that of the tokenizer. For parameter counts, see [presets.md](presets.md)."
    )
    return f"## Defaults of other sizes\n\n{_table(('key', *sizes), rows)}\n\n{note}\n"


def _other_kinds() -> list[str]:
    """Return one section of model keys per other kind of model."""
    kinds = [kind for kind in ARCHITECTURES if kind != OURS]
    about = "Keys of `model` with `--model-kind {0}`, instead of those above.\nSizes: {1}.\n\n"
    return [
        _section(
            "model", f"Model kind {kind}", about.format(kind, ", ".join(f"`{size}`" for size in presets.sizes(kind))), kind
        )
        for kind in kinds
    ]


def page() -> str:
    """Return the text of docs/configuration.md."""
    parts = [_BEGINNING, _section("", "General"), f"`{SMALL}` is the same as `--model-size small`.\n"]
    parts += [_section(name, title.capitalize()) for name, title in TITLES.items()]
    parts += _other_kinds()
    parts += [_section(name, name.capitalize(), f"{text[0].upper()}{text[1:]}.\n\n") for name, text in further().items()]
    return "\n".join([*parts, _other_sizes()])


if __name__ == "__main__":
    print(page(), end="")
