"""Chains: a teacher, its cache, and stages of a student, run one after the other from a YAML file.

Each is the command that a user would type. Stopped commands resume; finished ones are skipped.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from nash_mhc.checkpoint.run_folder import EVALUATIONS, RunFolder
from nash_mhc.config.commands import module_command, name_hint
from nash_mhc.config.fields import check_scheme
from nash_mhc.config.keys import find, keys
from nash_mhc.config.parsing import parse
from nash_mhc.config.schema import ConfigError
from nash_mhc.config.yaml_file import values_of
from nash_mhc.kits.distill.cache import FILE

TEACHER, CACHE = "teacher", "cache"
_KEYS = (TEACHER, CACHE, "student", "stages", "pack")
_CACHE_KEYS = ("top_k", "random", "temperatures")  # keys of `distill cache` that no run has


class Link(NamedTuple):
    """One command of the chain."""

    name: str
    folder: Path  # its output
    module: str
    argv: list[str]

    @property
    def is_run(self) -> bool:
        return self.module == "nash_mhc.train"


def _flags(where: str, settings: Any, others: tuple[str, ...] = ()) -> list[str]:
    """Return `total_steps: 300` as `--total-steps 300`; raise ConfigError for unknown keys."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}: must contain keys and values, such as total_steps: 300")
    words: list[str] = []
    for name, value in settings.items():
        if not isinstance(value, str | int | float | None) or (isinstance(value, int) and abs(value) >= 2**63):
            raise ConfigError(f"{where}: {name} takes a single value")
        if name in others:
            words += [f"--{name.replace('_', '-')}", str(value)]
            continue
        if (key := find(str(name))) is None:
            known = [k.short for k in keys().values()] + list(others)
            raise ConfigError(f"{where}: unknown key {name}{name_hint(str(name), known)[:200]}")
        if isinstance(value, bool):
            words.append(key.flag if value else f"--no-{key.flag[2:]}")
        else:
            words += [key.flag, "none" if value is None else str(value)]
    return words


def read_chain(file: Path, out: Path) -> list[Link]:
    """Return the commands of a chain, checked; raise ConfigError naming the place in the file."""
    chain = values_of(str(file))
    if not isinstance(chain, dict) or not isinstance(chain.get("stages"), list) or not chain["stages"]:
        raise ConfigError(f"{file}: must contain a list of stages; see recipes/kd-qat-2bit.yaml")
    if unknown := [name for name in chain if name not in _KEYS]:
        raise ConfigError(f"{file}: unknown key {unknown[0]}{name_hint(str(unknown[0]), _KEYS)}")
    if not isinstance(student := chain.get("student", {}), dict):
        raise ConfigError(f"{file}: student: must contain keys and values of a run")
    links: list[Link] = []
    folders: dict[str, Path] = {}
    if isinstance(given := chain.get(TEACHER, {}), str):
        check_scheme(f"{file}: teacher", given)
        folders[TEACHER] = Path(given).expanduser()
    else:
        folders[TEACHER] = out / TEACHER
        links.append(Link(TEACHER, out / TEACHER, "nash_mhc.train", [str(out / TEACHER), *_flags(f"{file}: {TEACHER}", given)]))
    cached = ["--teacher", str(folders[TEACHER]), "--out", str(out / CACHE)]
    cached += _flags(f"{file}: {CACHE}", chain.get(CACHE, {}), _CACHE_KEYS)
    links.append(Link(CACHE, out / CACHE, "nash_mhc.distill", ["cache", *cached]))
    previous = TEACHER
    for number, stage in enumerate(chain["stages"], 1):
        where = f"{file}: stage {number}"
        if not isinstance(stage, dict) or not isinstance(stage.get("name"), str):
            raise ConfigError(f"{where}: must contain a name and, optionally, settings of a run")
        name, settings = stage["name"], {k: v for k, v in stage.items() if k not in ("name", "from")}
        if name in folders or name == CACHE or Path(name).name != name:
            raise ConfigError(f"{where}: name {name!r} must be a unique folder name")
        origin = stage.get("from", previous)
        if not isinstance(origin, str) or (origin != "fresh" and origin not in folders):
            raise ConfigError(f"{where}: from {origin}: no such stage{name_hint(str(origin), ['fresh', *folders])}")
        given = {"dataset": str(out / CACHE)} | student | settings
        if origin != "fresh":
            given["init_from"] = str(folders[origin])
        folders[name] = out / name
        links.append(Link(name, out / name, "nash_mhc.train", [str(out / name), *_flags(where, given)]))
        previous = name
    for name in _named(chain.get("pack"), folders, file):
        words = ["pack", str(folders[name]), "--out", str(out / f"{name}-packed")]
        links.append(Link(f"{name}-packed", out / f"{name}-packed", "nash_mhc.hub", words))
    for link in links:
        if link.is_run:
            try:
                parse(link.argv[1:])
            except ConfigError as error:
                raise ConfigError(f"{file}: {link.name}: {error}") from None
    return links


def _named(value: Any, folders: dict[str, Path], file: Path) -> list[str]:
    names = value if isinstance(value, list) else [] if value is None else [value]
    for name in names:
        if not isinstance(name, str) or name not in folders:
            raise ConfigError(f"{file}: pack {name}: no such stage{name_hint(str(name), folders)}")
    return names


def _is_done(link: Link) -> bool:
    if link.is_run:
        steps = RunFolder(link.folder).steps() if link.folder.exists() else []
        return bool(steps) and steps[-1] >= parse(link.argv[1:]).config.train.total_steps
    return (link.folder / FILE).exists() if link.name == CACHE else link.folder.exists()


def run_chain(links: list[Link]) -> int:
    """Run the unfinished commands; return the exit code of the first that fails, or 0."""
    for number, link in enumerate(links, 1):
        if _is_done(link):
            continue
        print(f"== {number} of {len(links)}, {link.name}: {module_command(link.module, *link.argv)}", flush=True)
        if code := _exit_code([sys.executable, "-m", link.module, *link.argv]):
            if code != 2:  # 2: the command has printed the mistake
                again = module_command("nash_mhc.distill", *sys.argv[1:])
                print(f"{link.name} exited with {code}; to resume: {again}", file=sys.stderr)
            return code
    return 0


def _exit_code(argv: list[str]) -> int:
    """Run a command and return its exit code. On Ctrl-C, wait: the run receives it too and saves its last step."""
    with subprocess.Popen(argv) as process:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()


def results(links: list[Link]) -> list[dict[str, Any]]:
    """Return the last evaluation of every run."""
    found = []
    for link in links:
        if link.is_run and (rows := [row for row in RunFolder(link.folder).rows(EVALUATIONS) if "eval/loss" in row]):
            last = rows[-1]
            found.append({"name": link.name, "step": int(last["step"]), "loss": last["eval/loss"], "kl": last.get("eval/kl")})
    return found


def show(found: list[dict[str, Any]], out: Path) -> str:
    """Return a table, and write chain.json. Losses are relative to the first stage's, on the same held-out rows."""
    lines = [f"{'':<24}{'steps':>8}{'held-out loss':>16}{'of the first':>14}{'KL from teacher':>18}"]
    first = next((row["loss"] for row in found if row["kl"] is not None), None)
    for row in found:
        share, kl = ("", "") if row["kl"] is None else (f"{row['loss'] / first:.3f}", f"{row['kl']:.4f}")
        lines.append(f"{row['name']:<24}{row['step']:>8}{row['loss']:>16.4f}{share:>14}{kl:>18}")
    (out / "chain.json").write_text(json.dumps(found, indent=1) + "\n")
    return "\n".join(lines)
