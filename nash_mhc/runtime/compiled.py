"""Ahead-of-time compilation of a run's programs, and the cache where they survive a restart."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nash_mhc.ops.platform import in_any_order
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compat.cudnn import number_backward_passes
from nash_mhc.runtime.compat.jax import write_programs_whole
from nash_mhc.runtime.compiler_options import compiler_options
from nash_mhc.storage.files import Folder, is_remote

log = logging.getLogger(__name__)
_HIT = "/jax/compilation_cache/cache_hits"  # JAX's monitoring event, sent in the thread that compiles
_thread_state = threading.local()
_STALE_S = 3600.0  # a partial file without a write for this long was left by a killed process


def _cache_hits() -> int:
    """Return the number of cache hits in this thread so far."""
    return getattr(_thread_state, "hits", 0)


def _count_hit(event: str, **_: Any) -> None:
    if event == _HIT:
        _thread_state.hits = _cache_hits() + 1


jax.monitoring.register_event_listener(_count_hit)


def use_compilation_cache(folder: Folder) -> None:
    """Cache compiled programs in `.jax_cache` next to the run directory, unless the user has configured a cache.

    For a run in an object store, the cache is local, in runs/: other machines could not use it.
    """
    write_programs_whole()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.config.values["jax_compilation_cache_dir"] is None:
        beside = Path("runs") if is_remote(folder) else folder.parent
        cache = (beside / ".jax_cache").absolute()
        for part in cache.glob(".*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _STALE_S:
                    part.unlink()
        jax.config.update("jax_compilation_cache_dir", str(cache))


def remove_programs(folder: Folder) -> int:
    """Delete the cached programs if they are on the same, full disk as `folder`; return the number of bytes.

    A cache that the user has configured is left alone.
    """
    cache = jax.config.values["jax_compilation_cache_dir"]
    if cache is None or is_remote(folder) or "JAX_COMPILATION_CACHE_DIR" in os.environ or "://" in str(cache):
        return 0
    removed = 0
    with contextlib.suppress(OSError):
        if Path(cache).stat().st_dev == Path(folder).stat().st_dev:
            for program in Path(cache).glob("*-cache"):
                size = program.stat().st_size
                program.unlink()
                removed += size
    return removed


Program = Future[Any]  # `result()` waits for the executable
_THREAD = "compile"


def is_compiling() -> bool:
    """Return whether a compilation runs in the background."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def signature(tree: Any) -> tuple[str, ...]:
    """Return `inputs: int32[1,8,256]` for each leaf: the shapes that a program is compiled for."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(f"{jax.tree_util.keystr(p).lstrip('.')}: {x.dtype}{list(x.shape)}".replace(" ", "") for p, x in leaves)


class CompiledStep:
    """`fn(state, batch, *constants)`, compiled ahead of time. The shape of the state never changes.

    `constants` are scalars that are arguments of the program, so other values need no compilation. `traces` counts how
    often `fn` was traced: once per run; otherwise a warning names the shapes that have changed, unless
    `several_shapes` are expected.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        *,
        donate: bool = False,
        out_shardings: Any = None,
        deterministic: bool = True,
        constants: Sequence[Any] = (),
        several_shapes: bool = False,
    ) -> None:
        self._traces, self._earlier_traces = [0], 0  # the list is shared by copies (`with_constants`)
        self.seconds = 0.0  # spent compiling
        self.from_cache = False  # whether the compilation cache had the program

        def traced(*args: Any) -> Any:
            self._traces[0] += 1
            return fn(*args)

        options: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
        self._jit = jax.jit(traced, donate_argnums=(0,) if donate else (), **options)
        self._mesh, self._several_shapes = mesh, several_shapes
        self._constants = constants
        self._device_constants: list[Any] | None = None
        self._programs: dict[tuple[str, ...], Program] = {}  # by batch shape; shared by copies
        self._latest: tuple[str, ...] | None = None  # shape of the last batch
        # Only GPUs need options for determinism: elsewhere the same program always gives the same bits.
        platform = mesh.devices.flat[0].platform
        self._deterministic_gpu = platform == "gpu" and deterministic
        self._compiler_options = compiler_options(platform, deterministic=deterministic)

    @property
    def traces(self) -> int:
        return self._traces[0] - self._earlier_traces

    def compile(self, state: Any, batch: Any) -> Any:
        """Return the executable for a batch of this shape (arrays or ShapeDtypeStructs with shardings)."""
        key = signature(batch)
        if (program := self._programs.get(key)) is None:
            program, finish = self._trace(key, state, batch)
            finish(None)
        self._latest = key
        return program.result()

    def compile_in_background(self, state: Any, batch: Any, *, after: Program | None = None) -> Program:
        """Trace now and compile in another thread, `after` another program if given.

        Compiling in the main thread would delay signals. Tracing stays in the calling thread, in the same order at
        every start, because JAX's small functions remember their first caller, which changes the cache key.
        """
        key = signature(batch)
        if (program := self._programs.get(key)) is None:
            program, finish = self._trace(key, state, batch)
            # Not a daemon, which would crash the interpreter if it returned from the compiler during shutdown.
            threading.Thread(target=finish, args=(after,), name=_THREAD).start()
        self._latest = key
        return program

    def _trace(self, key: tuple[str, ...], state: Any, batch: Any) -> tuple[Program, Callable[[Program | None], None]]:
        """Trace; return the future program and the function that compiles it."""
        if self._latest is not None and not self._several_shapes:
            changes = [f"{new} (was {old})" for old, new in zip(self._latest, key, strict=False) if old != new]
            log.warning(f"recompiling the step because the batch changed: {'; '.join(changes)}")
        start = time.perf_counter()
        scalar = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=named_sharding(self._mesh))
        constants = jax.tree.map(scalar, self._constants)
        with jax.set_mesh(self._mesh), in_any_order(not self._deterministic_gpu):
            lowered = self._jit.lower(state, batch, *constants)
        if self._deterministic_gpu:
            number_backward_passes(lowered.compiler_ir("stablehlo"))
        self.seconds += time.perf_counter() - start
        program = self._programs[key] = Program()

        def finish(after: Program | None) -> None:
            try:
                if after is not None:
                    after.result()
                start, hits = time.perf_counter(), _cache_hits()
                compiled = lowered.compile(compiler_options=self._compiler_options)
            except BaseException as error:  # raise it in `result()`, and drop the entry so that a retry recompiles
                del self._programs[key]
                program.set_exception(error)
                return
            self.seconds += time.perf_counter() - start
            self.from_cache = _cache_hits() > hits
            program.set_result(compiled)

        return program, finish

    def text(self) -> str:
        """Return the HLO text of the last program, with op names."""
        assert self._latest is not None
        return str(self._programs[self._latest].result().as_text())

    def with_constants(self, constants: Sequence[Any] = ()) -> CompiledStep:
        """Return a copy for another run, with the same programs and other constants."""
        other = copy.copy(self)
        other._constants, other._device_constants = constants, None
        other._latest, other._earlier_traces, other.seconds, other.from_cache = None, self._traces[0], 0.0, False
        return other

    def __call__(self, state: Any, batch: Any) -> Any:
        if self._device_constants is None:
            self._device_constants = [jax.device_put(x, named_sharding(self._mesh)) for x in self._constants]
        return self.compile(state, batch)(state, batch, *self._device_constants)
