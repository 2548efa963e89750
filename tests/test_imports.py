"""The direction of imports: every folder of the package uses only those that lie before it."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nash_mhc"

COMPAT = "runtime.compat"  # a layer of its own, below all that needs a library's private names
ORDER = (
    "config",
    COMPAT,
    "storage",
    "parallel",
    "checkpoint",
    "ops",
    "runtime",
    "model",
    "data",
    "optim",
    "objectives",
    "loading",
    "telemetry",
    "estimate",
    "train",
    "generate",
    "evaluate",
    "plan",
    "report",
    "bench",
    "doctor",
    "notebook",
    "kits",
)

# What each folder may use beside itself. A new need is a new entry here, made on purpose.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    COMPAT: {"config"},
    "storage": {"config", COMPAT},
    "parallel": {"config", COMPAT},
    "checkpoint": {"config", "storage", "parallel", COMPAT},
    "ops": {COMPAT},
    "runtime": {"config", "storage", "parallel", "ops", COMPAT},
    "model": {"config", "parallel", "ops"},
    "data": {"config", "storage", "checkpoint", COMPAT},
    "optim": {"config", "parallel"},
    "objectives": {"config", "parallel", "ops", "model"},
    "loading": {"config", "storage", "parallel", "checkpoint", "model", "data"},
    "telemetry": {"config", "storage", "checkpoint"},
    "estimate": {"config", "parallel", "ops", "runtime", "model", "optim", "objectives"},
    "train": {
        "config", "storage", "parallel", "checkpoint", "ops", "runtime", "model", "data", "optim", "objectives", "loading",
        "telemetry", "estimate",
    },
    "generate": {"config", "storage", "checkpoint", "runtime", "model", "data", "loading"},
    "evaluate": {
        COMPAT, "config", "storage", "parallel", "ops", "runtime", "model", "data", "objectives", "loading", "train",
    },
    "plan": {"config", "parallel", "runtime", "model", "objectives", "estimate", "train"},
    "report": {"config", "storage", "checkpoint", "plan"},
    "bench": {
        COMPAT, "config", "checkpoint", "parallel", "ops", "runtime", "model", "data", "optim", "objectives", "loading",
        "estimate", "train", "plan", "report", "telemetry",
    },
    "doctor": {"config", "storage", "parallel", "checkpoint", "runtime", "train"},
    "notebook": {"config", "storage", "checkpoint", "runtime", "model", "data"},
    # A kit may use all of the core, and the core no kit; one kit does not use another (see below).
    "kits": {
        "config", "storage", "parallel", "checkpoint", "ops", "runtime", "model", "data", "optim", "objectives", "loading",
        "telemetry", "estimate", "train", "generate", "evaluate", "plan", "report", "bench", COMPAT,
    },
}  # fmt: skip

# Outside libraries that would betray the purpose of a folder.
FOREIGN: dict[str, set[str]] = {
    "config": {"jax", "jaxlib", "equinox", "optax", "orbax", "grain", "numpy", "transformers", "tensorboard"},
    "storage": {"jaxlib", "equinox", "optax", "orbax", "grain", "numpy", "transformers", "tensorboard"},
    "parallel": {"optax", "orbax", "grain", "transformers", "tensorboard"},
    "checkpoint": {"equinox", "optax", "grain", "transformers", "tensorboard"},
    "ops": {"equinox", "optax", "orbax", "grain", "transformers", "tensorboard", "yaml"},
    "runtime": {"equinox", "optax", "orbax", "grain", "transformers", "tensorboard"},
    "model": {"optax", "orbax", "grain", "transformers", "tensorboard", "yaml"},
    "data": {"jax", "jaxlib", "equinox", "optax", "orbax", "tensorboard"},
    "loading": {"optax", "grain", "transformers", "tensorboard"},
    "telemetry": {"jax", "jaxlib", "equinox", "optax", "orbax", "grain", "transformers"},
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Of its imports and functions; the same text is asked for by many tests."""
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def imported(source: str, package: str) -> Iterator[str]:
    """Every module that the text imports, deferred imports and relative ones included; `from a import b` is a.b."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def dotted(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> list[str]:
    return list(imported(file.read_text(encoding="utf-8"), ".".join(file.relative_to(ROOT).parts[:-1])))


def folder_of(module: str) -> str | None:
    """The folder of a module of the package; None for the package's own file and for other libraries."""
    parts = module.split(".")
    if parts[:3] == ["nash_mhc", *COMPAT.split(".")]:
        return COMPAT
    return parts[1] if parts[0] == "nash_mhc" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else None


def test_reader_sees_every_form_of_import() -> None:
    source = (
        "import a.b as c\nfrom nash_mhc.ops import rope\nfrom . import sibling\nfrom ..model.lm import LM\n"
        "def f():\n    if True:\n        import late\n"
    )
    expected = {"a.b", "nash_mhc.ops.rope", "nash_mhc.data.sibling", "nash_mhc.model.lm.LM", "late"}
    assert set(imported(source, "nash_mhc.data")) == expected


def test_every_folder_has_its_row() -> None:
    folders = {folder_of(dotted(f)) for f in files() if f.parent != PACKAGE}
    assert folders <= set(ORDER)
    assert set(ALLOWED) == set(ORDER)
    for name, others in ALLOWED.items():
        assert others <= set(ORDER[: ORDER.index(name)]), f"{name} may use only what lies before it"


@pytest.mark.parametrize("folder", ORDER)
def test_folder_uses_only_what_it_may(folder: str) -> None:
    for file in [file for file in files() if folder_of(dotted(file)) == folder]:
        for module in imports_of(file):
            other = folder_of(module)
            assert other in {None, folder, *ALLOWED[folder]}, f"{dotted(file)} imports {module}"
            outside = module.split(".")[0]
            assert outside not in FOREIGN.get(folder, set()), f"{dotted(file)} imports {module}"


def test_no_kit_imports_another() -> None:
    for file in sorted((PACKAGE / "kits").rglob("*.py")):
        for module in imports_of(file):
            parts = module.split(".")
            if parts[:2] == ["nash_mhc", "kits"]:
                assert parts[2:3] == [file.relative_to(PACKAGE / "kits").parts[0]], f"{dotted(file)} imports {module}"


def test_the_record_of_a_kit_needs_no_other_library() -> None:
    """Flags and `--help` import `__init__.py` of every kit, and the modules of its config sections and presets."""
    for kit in sorted(p for p in (PACKAGE / "kits").iterdir() if (p / "__init__.py").is_file()):
        for file in (kit / "__init__.py", kit / "settings.py"):
            for module in imports_of(file) if file.exists() else []:
                assert folder_of(module) in {None, "config", "kits"}, f"{dotted(file)} imports {module}"
                assert module.split(".")[0] not in FOREIGN["config"], f"{dotted(file)} imports {module}"


def test_no_file_imports_a_command() -> None:
    """Commands are the top: `__main__` of a folder, and files beside the folders."""
    commands = {f"nash_mhc.{f.stem}" for f in PACKAGE.glob("*.py") if f.stem != "__init__"}
    for file in files():
        for module in imports_of(file):
            assert "__main__" not in module.split("."), f"{dotted(file)} imports {module}"
            assert ".".join(module.split(".")[:2]) not in commands, f"{dotted(file)} imports {module}"


def test_no_test_imports_from_another_test() -> None:
    for file in (ROOT / "tests").rglob("test_*.py"):
        for module in imported(file.read_text(encoding="utf-8"), "tests"):
            assert not module.startswith("test_"), f"{file.name} imports {module}: what several use is in a helper module"


# Files of more than 400 lines, and functions of more than 80, each with its reason.
LONGER = {
    "nash_mhc/kits/hub/modeling_nash_mhc.py": "travels alone with an exported model",
    "tests/bench/test_bench.py": "one comparison of variants, asked many things",
    "tests/kits/hub/test_hub_import.py": "the same transformers models, imported and exported",
    "tests/kits/recursive/test_puzzles.py": "three kinds of puzzles, solved by exhaustive search",
}


def test_no_function_is_longer_than_80_lines_and_no_file_than_400() -> None:
    for file in [*files(), *(ROOT / "tests").rglob("*.py")]:
        name, text = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400 or name in LONGER, name
        for node in nodes_of(text):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 80, f"{name}: {node.name}, {length}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    modules = {dotted(file) for file in files()}

    def module_of(name: str) -> str | None:
        """`nash_mhc.ops.rope.apply` is in module nash_mhc.ops.rope."""
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    graph = {dotted(f): {m for name in imports_of(f) if (m := module_of(name)) and m != dotted(f)} for f in files()}
    # A folder's own __init__ gathers names from its files; a file that asks it for a name would go round in a circle.
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in sorted(modules):
        visit(module, ())
    assert done == modules
