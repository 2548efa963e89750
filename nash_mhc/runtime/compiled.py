"""A function compiled once for a whole run. Anything else is reported with the shapes that caused it."""

from __future__ import annotations

import contextlib
import copy
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

_FOUND = "/jax/compilation_cache/cache_hits"  # what JAX calls it when a program was in the cache
_here = threading.local()  # JAX tells it in the thread that asked for the program
_LEFT_BEHIND_S = 3600.0  # who has written nothing to a part of a file for so long is dead


def found_in_cache() -> int:
    """Programs that this thread has asked for so far and that were in the cache."""
    return getattr(_here, "found", 0)


def _count(event: str, **_: Any) -> None:
    if event == _FOUND:
        _here.found = found_in_cache() + 1


jax.monitoring.register_event_listener(_count)


def use_compilation_cache(folder: Folder) -> None:
    """A restarted run starts in seconds:
    compiled programs are kept beside the runs, unless the user keeps them elsewhere.

    Those of a run in an object store lie where the runs of this machine have theirs:
    they are of no use to another machine.
    """
    write_programs_whole()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.config.values["jax_compilation_cache_dir"] is None:
        beside = Path("runs") if is_remote(folder) else folder.parent
        cache = (beside / ".jax_cache").absolute()
        for part in cache.glob(".*.part"):  # of processes that were killed while they wrote it
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _LEFT_BEHIND_S:
                    part.unlink()
        jax.config.update("jax_compilation_cache_dir", str(cache))


def remove_programs(folder: Folder) -> int:
    """Removes the compiled programs that lie on the same disk as `folder`, which is full; returns their bytes.

    Those that users keep elsewhere, in a folder of their own choice, stay.
    """
    named = jax.config.values["jax_compilation_cache_dir"]
    if named is None or is_remote(folder) or "JAX_COMPILATION_CACHE_DIR" in os.environ or "://" in str(named):
        return 0
    removed = 0
    with contextlib.suppress(OSError):
        if Path(named).stat().st_dev == Path(folder).stat().st_dev:
            for program in Path(named).glob("*-cache"):
                size = program.stat().st_size
                program.unlink()
                removed += size
    return removed


Program = Future[Any]  # one that is to come: `result()` waits for it
_THREAD = "compile"


def is_compiling() -> bool:
    """Whether something is being compiled that nobody may be waiting for any more."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def signature(tree: Any) -> tuple[str, ...]:
    """`inputs: int32[1,8,256]` for each leaf: what a compiled step is specific to."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(f"{jax.tree_util.keystr(p).lstrip('.')}: {x.dtype}{list(x.shape)}".replace(" ", "") for p, x in leaves)


class CompiledStep:
    """Ahead-of-time compilation of `fn(state, batch, *constants)`; the state is donated, its shape never changes.

    `constants` are scalars that stay the same from step to step but are no part of the program: with others, the same
    one runs. `traces` counts how often Python ran the function: once a run, or `warn` hears what changed.
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
        warn: Callable[[str], None] = print,
    ) -> None:
        self._traces, self._before = [0], 0  # shared by all that run the same programs; how many there were before this one
        self.seconds = 0.0  # spent compiling
        self.from_cache = False  # whether an earlier start had compiled it

        def traced(*args: Any) -> Any:
            self._traces[0] += 1
            return fn(*args)

        options: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
        self._jit = jax.jit(traced, donate_argnums=(0,) if donate else (), **options)
        self._mesh, self._warn = mesh, warn
        self._constants = constants
        self._placed: list[Any] | None = None  # on the mesh
        self._programs: dict[tuple[str, ...], Program] = {}  # by the batch's shape; shared as well
        self._latest: tuple[str, ...] | None = None  # shape of this one's last batch
        # A GPU may add up sums in any order, and take whatever kernel was fastest just now, unless it is asked
        # otherwise. Everywhere else the same program gives the same bits.
        platform = mesh.devices.flat[0].platform
        self._deterministic_gpu = platform == "gpu" and deterministic
        self._compiler_options = compiler_options(platform, deterministic=deterministic)

    @property
    def traces(self) -> int:
        return self._traces[0] - self._before

    def compile(self, state: Any, batch: Any) -> Any:
        """The executable for a batch of this shape (arrays or ShapeDtypeStructs with shardings), once it is there."""
        key = signature(batch)
        if (program := self._programs.get(key)) is None:
            program, finish = self._trace(key, state, batch)
            finish(None)
        self._latest = key
        return program.result()

    def compile_in_background(self, state: Any, batch: Any, *, after: Program | None = None) -> Program:
        """Traces at once, and starts to compile in a thread of its own, once another program is there.

        Other things can be compiled meanwhile, and an interrupt gets through, which a compiler in the main thread holds
        up. What is traced by the same thread is traced in the same order at every start, so that the same functions
        become the same programs: small ones of JAX's own remember who has called them first.
        """
        key = signature(batch)
        if (program := self._programs.get(key)) is None:
            program, finish = self._trace(key, state, batch)
            # No daemon: a thread that comes back from the compiler while the interpreter ends would tear the process
            # down.
            threading.Thread(target=finish, args=(after,), name=_THREAD).start()
        self._latest = key
        return program

    def _trace(self, key: tuple[str, ...], state: Any, batch: Any) -> tuple[Program, Callable[[Program | None], None]]:
        """A program that is to come, and what makes it come, once another one is there: the compiler's part."""
        if self._latest is not None:
            changes = [f"{new} (was {old})" for old, new in zip(self._latest, key, strict=False) if old != new]
            self._warn(f"the step is compiled again, because the batch changed: {'; '.join(changes)}")
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
                start, found = time.perf_counter(), found_in_cache()
                compiled = lowered.compile(compiler_options=self._compiler_options)
            except BaseException as error:  # whatever it is, whoever waits shall have it; the next one may try again
                del self._programs[key]
                program.set_exception(error)
                return
            self.seconds += time.perf_counter() - start
            self.from_cache = found_in_cache() > found
            program.set_result(compiled)

        return program, finish

    def text(self) -> str:
        """Of the program that ran last: every instruction with the names of what it is part of."""
        assert self._latest is not None
        return str(self._programs[self._latest].result().as_text())

    def with_constants(self, constants: Sequence[Any] = (), warn: Callable[[str], None] = print) -> CompiledStep:
        """The same programs, those that are compiled already among them, with other numbers, for another run."""
        other = copy.copy(self)
        other._constants, other._placed, other._warn = constants, None, warn
        other._latest, other._before, other.seconds, other.from_cache = None, self._traces[0], 0.0, False
        return other

    def __call__(self, state: Any, batch: Any) -> Any:
        if self._placed is None:
            self._placed = [jax.device_put(x, named_sharding(self._mesh)) for x in self._constants]
        return self.compile(state, batch)(state, batch, *self._placed)
