"""Eight emulated host devices for the whole suite, a compilation cache for the processes that a worker starts,
and an order."""

import gc
import logging
import os
import platform
import signal
import sys
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from pathlib import Path

gc.disable()  # until all is imported: of modules nothing can be freed

CACHE = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path(__file__).parent.parent / ".cache" / "jax")
# For the subprocesses that some tests start, too: what one of them has compiled is there for all.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PLATFORMS"] = "cpu"
# Where in Python an operation came from is written into every program, and read by nobody here:
# a fifteenth of the time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
for name in [
    n
    for n in os.environ
    if n.startswith(("SLURM_", "OMPI_", "JOB_COMPLETION_", "TPU_", "MEGASCALE_", "JAX_COORDINATOR", "TORCHELASTIC_", "MASTER_"))
    or n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "USE_TPU")
]:
    del os.environ[name]  # the scheduler that runs these tests is not theirs
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on a network, or wait for one
# Compiling is most of the suite's time, and these programs run for milliseconds: let LLVM hurry, on one core: the other
# one has its own. HLO is not affected.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
if platform.machine() == "x86_64":
    # Unoptimized code for these fuses a product and a sum here and not there, so that the same numbers on another mesh
    # differ in their last bit. Optimized, as users run it, it does not; nor where there is nothing to fuse them with.
    os.environ["XLA_FLAGS"] += " --xla_cpu_max_isa=AVX"
if version("jaxlib").startswith("0.10."):
    # The newer of XLA's two code generators for fused loops takes three times as long, and without LLVM's optimizer the
    # code it repeats in every branch of a large fusion is really run: minutes a step.
    # An XLA that does not know the flag would stop.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

for number in (signal.SIGINT, signal.SIGHUP):  # ignored in the background of some shells, and that is inherited
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

import equinox  # noqa: E402, F401
import grain  # noqa: E402, F401
import jax  # noqa: E402  (after the environment that it reads)
import optax  # noqa: E402, F401
import orbax.checkpoint  # noqa: E402, F401
import pytest  # noqa: E402

# Our own modules have type checks here that other processes do not know: where two threads import at once, jaxtyping
# can write those under the name of the ordinary bytecode. That of all others is kept, for workers and processes.
OURS, write_bytecode = str(Path(__file__).parent.parent / "nash_mhc"), SourceFileLoader.set_data


def write_that_of_others(loader, path, data, **options):
    if not path.startswith(OURS):
        write_bytecode(loader, path, data, **options)


SourceFileLoader.set_data = write_that_of_others

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Files that one process runs, one after the other: those that use each other's compiled steps, those that mostly wait
# for something (two of three workers are left for what computes, on two cores), those that need torch.
_TOGETHER = {
    "steps": "invariants health hlo step bad_steps spikes mesh_axes precision".split(),
    "waiting": "processes process_faults kills run_lock run_owner start_signals signals doctor watchdog moved".split(),
    "torch": (
        "torch_model doubly_stochastic hub_import evaluate adapters generate_prompts torch_step model_and_tokenizer".split()
    ),
}
# They begin first, then the files that take longest, so that at the end there are many short ones for whoever is free.
_LONGEST = (
    "notebooks bench first_hour incremental distill recursive quantized kits plan_memory lora reservoir "
    "value_embedding gradients_agree puzzle_runs plan run resume tuning generate puzzle_objective preflight trainable "
    "new_mixer objectives fuzz bad_input bench_parts residual_streams loader weights start multiscale inside "
    "distill_loss mesh puzzles streamed_rows hub_round_trip object_store spread attend_triton rates prepare nash lm "
    "extending quantize report_browser pairs"
)
_FIRST = [name for names in _TOGETHER.values() for name in names] + _LONGEST.split()
_GROUP = {f"test_{name}": group for group, names in _TOGETHER.items() for name in names}


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": number for number, name in enumerate(_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(optionalhook=True)  # there is no such hook without xdist
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrTogether(LoadFileScheduling):
        def _split_scope(self, nodeid):
            path = super()._split_scope(nodeid)
            return _GROUP.get(Path(path).stem, path)

    return ByFileOrTogether(config, log)


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test():
    yield
    if "training_process" in sys.modules:
        sys.modules["training_process"].TrainingProcess.kill_those_left()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes run.yaml into the current folder, so that messages begin with a plain `run.yaml:`."""
    monkeypatch.chdir(tmp_path)

    def write_(text: str | bytes, name: str = "run.yaml") -> str:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write_


def pytest_sessionstart():
    from nash_mhc.runtime.compat.jax import write_programs_whole  # not before its types are checked at run time

    write_programs_whole()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config):
    # A worker that has told everything: to look through all that it holds, and to take it down, takes seconds.
    if hasattr(config, "workerinput"):
        os._exit(0)


def pytest_collection_finish():
    # Tracing makes many small objects, most of them for good:
    # looking through them again and again is a tenth of the time.
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 20, 20)


class _Collect(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture
def messages():
    """Messages of the package from level INFO on, as a handler of a library user gets them."""
    package, handler = logging.getLogger("nash_mhc"), _Collect()
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    yield handler.texts
    package.removeHandler(handler)
    package.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_handler_is_left():
    """Commands configure logging for their process, which a test shares with the next one."""
    yield
    if "nash_mhc.config.logs" in sys.modules:
        sys.modules["nash_mhc.config.logs"].silence()
