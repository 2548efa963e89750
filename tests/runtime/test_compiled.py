"""Background compilation, the compilation cache and compiler options."""

import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import small
from jax._src import lru_cache

from nash_mhc.config.schema import MeshConfig
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.runtime import compiler_options
from nash_mhc.runtime.compat.jax import write_programs_whole
from nash_mhc.runtime.compiled import CompiledStep, Program, is_compiling, remove_programs, use_compilation_cache
from nash_mhc.runtime.compiler_options import OPTIONS, Option, as_comments
from nash_mhc.train import evaluate
from nash_mhc.train.state import ProgramKey
from nash_mhc.train.step import compile_train_step


def test_a_program_compiled_in_the_background_is_used():
    seen = []

    def add(state, batch):
        seen.append(threading.current_thread() is threading.main_thread())
        return state + batch

    step = CompiledStep(add, make_mesh(MeshConfig(1, 1, 1)))
    step.compile_in_background(jnp.ones(3), jnp.ones(3)).result()
    assert step(jnp.ones(3), jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert (step.traces, seen) == (1, [True])  # traced at once: in the same order at every start
    assert step.seconds > 0


def test_a_compilation_error_is_raised_in_result():
    def broken(state, batch):
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        CompiledStep(broken, make_mesh(MeshConfig(1, 1, 1))).compile_in_background(jnp.ones(3), jnp.ones(3))


def test_one_program_is_compiled_after_another():
    mesh, first, seen = make_mesh(MeshConfig(1, 1, 1)), Program(), []
    second = CompiledStep(jnp.add, mesh)
    program = second.compile_in_background(jnp.ones(3), jnp.ones(3), after=first)
    assert (program.done(), is_compiling()) == (False, True)
    asks = threading.Thread(target=lambda: seen.append(second(jnp.ones(3), jnp.ones(3)).tolist()))
    asks.start()  # who needs it waits for it, and has nothing compiled for a second time
    first.set_result(None)
    program.result()
    asks.join()
    assert seen == [[2.0, 2.0, 2.0]]
    assert list(second._programs.values()) == [program]


def test_a_program_after_a_failed_one_fails_too_and_can_be_retried(monkeypatch):
    monkeypatch.setitem(OPTIONS, "cpu", (Option("xla_no_such_option", True, "because"),))
    mesh = make_mesh(MeshConfig(1, 1, 1))
    first = CompiledStep(jnp.add, mesh)
    monkeypatch.setitem(OPTIONS, "cpu", ())
    second = CompiledStep(jnp.add, mesh)
    compiled = first.compile_in_background(jnp.ones(3), jnp.ones(3))
    behind = second.compile_in_background(jnp.ones(3), jnp.ones(3), after=compiled)
    for program in compiled, behind:
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            program.result()
    assert second(jnp.ones(3), jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_cache_entries_are_written_atomically(tmp_path):
    """Processes that share the cache read at any moment, and may be killed at any moment."""
    write_programs_whole()
    cache, value = lru_cache.LRUCache(str(tmp_path), max_size=-1), b"x" * 20_000_000
    seen, over = set(), threading.Event()

    def read():
        while not over.is_set():
            seen.update(len(cache.get(f"{n}") or b"") for n in range(10))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(10):
        cache.put(f"{n}", value)
    over.set()
    reader.join()
    assert seen <= {0, len(value)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n}-cache" for n in range(10)]
    cache.put("3", b"another")  # what is there stays
    assert cache.get("3") == value


def test_the_cache_leaves_space_for_checkpoints(tmp_path, monkeypatch):
    write_programs_whole()
    cache, value = lru_cache.LRUCache(str(tmp_path), max_size=-1), b"x" * 1000
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=9_999))
    cache.put("a", value)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=10_000))
    cache.put("a", value)
    assert cache.get("a") == value


def test_the_cache_on_a_full_disk_is_deleted(tmp_path, monkeypatch):
    before, runs = jax.config.values["jax_compilation_cache_dir"], tmp_path / "runs"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    (runs / "a").mkdir(parents=True)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        use_compilation_cache(runs / "a")
        (runs / ".jax_cache").mkdir()
        (runs / ".jax_cache" / "x-cache").write_bytes(b"123")
        with monkeypatch.context() as named:  # a folder of the user's own choice
            named.setenv("JAX_COMPILATION_CACHE_DIR", str(runs / ".jax_cache"))
            assert remove_programs(runs / "a") == 0
        assert remove_programs(Path("/dev/shm")) == 0  # another disk
        assert remove_programs(runs / "a") == 3
        assert not list((runs / ".jax_cache").iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_make_train_and_its_printed_commands_share_a_cache():
    """Both beside the runs: nothing in the Makefile names another place."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "JAX_COMPILATION_CACHE_DIR" not in makefile


EFFORT = "xla_backend_optimization_level"


def asked(platform, environment, deterministic=False):
    return compiler_options.compiler_options(platform, deterministic=deterministic, environment=environment)


def test_the_users_cache_is_not_changed(tmp_path):
    assert asked("cpu", {}) == {EFFORT: "1"}
    assert asked("cpu", {"XLA_FLAGS": f"--xla_dump_to=/x --{EFFORT}=3"}) == {}
    assert asked("cpu", {"XLA_FLAGS": f"--{EFFORT}_of_another=3"}) == {EFFORT: "1"}  # not the same flag
    (tmp_path / "flags").write_text(f"--{EFFORT}=2\n")
    assert asked("cpu", {"XLA_FLAGS": str(tmp_path / "flags")}) == {}
    assert asked("gpu", {}) == {}
    assert asked("gpu", {}, deterministic=True) == {"xla_gpu_deterministic_ops": True}
    assert asked("gpu", {"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}, deterministic=True) == {}


def test_every_compiler_option_exists():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for options in OPTIONS.values():
        lowered.compile(compiler_options={option.name: option.value for option in options})


@pytest.mark.parametrize("deterministic", [True, False])
def test_only_the_step_may_be_nondeterministic(monkeypatch, deterministic):
    """Evaluations and a teacher's words are kept with the run as its losses are."""
    monkeypatch.setitem(OPTIONS, "cpu", (Option("xla_same_bits", True, "because", deterministic=True),))  # as a GPU has one
    # Another width than any other test's: programs of the same shapes are shared.
    cfg = small.config(model__ffn=40, train__deterministic=deterministic)
    mesh = make_mesh(cfg.mesh)
    assert compile_train_step(cfg, mesh)._compiler_options == ({"xla_same_bits": True} if deterministic else {})
    for program in evaluate._evaluation(ProgramKey.of(cfg), mesh, None), CompiledStep(jnp.add, mesh):
        assert program._compiler_options == {"xla_same_bits": True}


def test_an_option_reaches_the_compiler_and_is_shown(monkeypatch):
    monkeypatch.setitem(OPTIONS, "cpu", (Option("xla_no_such_option", True, "because"),))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        CompiledStep(jnp.add, make_mesh(MeshConfig(1, 1, 1))).compile(jnp.ones(3), jnp.ones(3))
    assert as_comments("cpu", deterministic=False).splitlines()[1:] == ["#   xla_no_such_option=true: because"]
    assert as_comments("tpu", deterministic=True).splitlines()[1:] == ["#   none"]
