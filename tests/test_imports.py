"""The direction of imports: every folder of the package uses only those that lie before it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nash_mhc"

ORDER = (
    "config",
    "storage",
    "parallel",
    "checkpoint",
    "ops",
    "runtime",
    "model",
    "data",
    "optim",
    "objectives",
    "hub",
    "telemetry",
    "train",
    "generate",
    "evaluate",
    "distill",
    "plan",
    "report",
    "bench",
    "doctor",
    "notebook",
)

# What each folder may use beside itself. A new need is a new entry here, made on purpose.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "storage": {"config"},
    "parallel": {"config"},
    "checkpoint": {"config", "storage", "parallel"},
    "ops": set(),
    "runtime": {"config", "storage", "parallel", "ops"},
    "model": {"config", "parallel", "ops"},
    "data": {"config", "storage", "checkpoint"},
    "optim": {"config", "parallel"},
    "objectives": {"config", "parallel", "ops", "model"},
    "hub": {"config", "storage", "parallel", "checkpoint", "ops", "model", "data"},
    "telemetry": {"config", "storage", "checkpoint"},
    "train": {
        "config", "storage", "parallel", "checkpoint", "ops", "runtime", "model", "data", "optim", "objectives", "hub",
        "telemetry",
    },
    "generate": {"config", "storage", "checkpoint", "runtime", "model", "data", "hub"},
    "evaluate": {
        "config", "storage", "parallel", "ops", "runtime", "model", "data", "objectives", "hub", "train",
    },
    "distill": {
        "config", "storage", "parallel", "checkpoint", "runtime", "model", "data", "objectives", "hub", "train",
    },
    "plan": {"config", "parallel", "runtime", "model", "train"},
    "report": {"config", "storage", "checkpoint", "plan"},
    "bench": {
        "config", "checkpoint", "parallel", "ops", "runtime", "model", "data", "optim", "objectives", "hub", "train", "plan",
        "report", "telemetry",
    },
    "doctor": {"config", "storage", "parallel", "checkpoint", "runtime", "train"},
    "notebook": {"config", "storage", "checkpoint", "runtime", "model", "data"},
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
    "hub": {"optax", "grain", "tensorboard"},
    "telemetry": {"jax", "jaxlib", "equinox", "optax", "orbax", "grain", "transformers"},
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(source: str, package: str) -> Iterator[str]:
    """Every module that the text imports, deferred imports and relative ones included; `from a import b` is a.b."""
    for node in ast.walk(ast.parse(source)):
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
    return parts[1] if parts[0] == "nash_mhc" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else None


def test_reader_sees_every_form_of_import() -> None:
    source = (
        "import a.b as c\nfrom nash_mhc.ops import rope\nfrom . import sibling\nfrom ..model.lm import LM\n"
        "def f():\n    if True:\n        import late\n"
    )
    expected = {"a.b", "nash_mhc.ops.rope", "nash_mhc.data.sibling", "nash_mhc.model.lm.LM", "late"}
    assert set(imported(source, "nash_mhc.data")) == expected


def test_every_folder_has_its_row() -> None:
    folders = {f.relative_to(PACKAGE).parts[0] for f in files() if f.parent != PACKAGE}
    assert folders <= set(ORDER)
    assert set(ALLOWED) == set(ORDER)
    for name, others in ALLOWED.items():
        assert others <= set(ORDER[: ORDER.index(name)]), f"{name} may use only what lies before it"


@pytest.mark.parametrize("folder", ORDER)
def test_folder_uses_only_what_it_may(folder: str) -> None:
    for file in sorted((PACKAGE / folder).rglob("*.py")):
        for module in imports_of(file):
            other = folder_of(module)
            assert other in {None, folder, *ALLOWED[folder]}, f"{dotted(file)} imports {module}"
            outside = module.split(".")[0]
            assert outside not in FOREIGN.get(folder, set()), f"{dotted(file)} imports {module}"


def test_no_file_imports_a_command() -> None:
    """Commands are the top: `__main__` of a folder, and files beside the folders."""
    commands = {f"nash_mhc.{f.stem}" for f in PACKAGE.glob("*.py") if f.stem != "__init__"}
    for file in files():
        for module in imports_of(file):
            assert "__main__" not in module.split("."), f"{dotted(file)} imports {module}"
            assert ".".join(module.split(".")[:2]) not in commands, f"{dotted(file)} imports {module}"


# JAX's private modules, each used in one file, which says what to do should it vanish.
PRIVATE = {
    "jax._src.lib": "nash_mhc.parallel.processes",
    "jax._src.cudnn": "nash_mhc.ops.attend_cudnn",
    "jax._src.distributed": "nash_mhc.parallel.board",
    "jax._src.lru_cache": "nash_mhc.runtime.program_cache",
}


def test_each_private_module_of_jax_is_used_in_one_file() -> None:
    for file in files():
        for module in imports_of(file):
            if module.startswith(("jax._src", "jaxlib")):
                (name,) = [name for name in PRIVATE if module.startswith(name)]
                assert dotted(file) == PRIVATE[name], f"{dotted(file)} imports {module}"
                assert f"`{name}" in file.read_text() and "vanish" in file.read_text()


def test_no_test_imports_from_another_test() -> None:
    for file in (ROOT / "tests").glob("*.py"):
        for module in imported(file.read_text(encoding="utf-8"), "tests"):
            assert not module.startswith("test_"), f"{file.name} imports {module}: what several use is in a helper module"


def test_the_names_of_the_architecture_page_are_the_names_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named: dict[str, set[str]] = {}
    for folder, text in re.findall(r"\*\*(\w+)\*\*: (.*?)(?=\*\*\w+\*\*: |\n\n)", page, flags=re.DOTALL):
        named[folder] = set(re.findall(r"`(\w+)`", text))
    assert set(named) == set(ORDER)
    for folder, names in named.items():
        there = {f.stem for f in (PACKAGE / folder).rglob("*.py")} - {"__init__", "__main__"}
        assert there <= names, f"{folder}: not on the page"
        functions = {"save", "newest", "restore"}  # which store.py is told by
        assert names - functions <= there, f"{folder}: on the page only"


def test_no_function_is_longer_than_80_lines_and_no_file_than_320() -> None:
    """Those that are have their sentence in docs/log.md."""
    log = " ".join((ROOT / "docs" / "log.md").read_text(encoding="utf-8").split())
    for file in [*files(), *(ROOT / "tests").glob("*.py")]:
        name, text = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 320 or f"`{name}` is longer" in log, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 80 or f"`{node.name}` in `{name}` is longer" in log, f"{name}: {node.name}, {length}"


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
