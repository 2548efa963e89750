"""Private names of libraries are used only in runtime/compat, and the program works without each of them."""

import ast
import importlib
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from nash_mhc.bench import corpus
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.ops.attend import attend, attend_with_lse
from nash_mhc.ops.attention_io import AttentionInput
from nash_mhc.ops.kernels import attend_cudnn
from nash_mhc.parallel import processes
from nash_mhc.runtime.compat import cudnn, lm_eval, orbax, pip
from nash_mhc.runtime.compat import jax as compat_jax

PACKAGE = Path(__file__).parents[2] / "nash_mhc"
COMPAT = PACKAGE / "runtime" / "compat"


def outside_names(tree):
    """Names of a file that stand for other libraries' modules, and what they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: module for name, module in found.items() if not module.startswith("nash_mhc")}


def private_names(source):
    """Private names of other libraries that a file uses, and attributes of theirs that it replaces."""
    tree = ast.parse(source)
    outside = outside_names(tree)
    in_python = lambda dotted: dotted.partition(".")[0] in sys.stdlib_module_names
    is_private = lambda name: name.startswith("_") and not name.startswith("__")
    found = {module for module in outside.values() if any(map(is_private, module.split("."))) and not in_python(module)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found |= {ast.unparse(node)} if ast.unparse(node.args[0]) in outside else set()
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            module = outside.get(dotted.partition(".")[0])
            is_patch = isinstance(node.ctx, ast.Store) and dotted != "sys.argv"
            if module and (is_patch or (is_private(node.attr) and not in_python(module))):
                found.add(dotted)
    return found


def test_private_names_are_found():
    source = "import jax\nimport sys\nfrom jax._src import core as c\nfrom a._b import d\njax._x()\nsys.hook = 1\njax.y.z\n"
    source += "setattr(c, 'x', 1)\n"
    assert private_names(source) == {"jax._src.core", "a._b.d", "jax._x", "sys.hook", "setattr(c, 'x', 1)"}


def test_private_names_are_used_only_in_compat():
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.parent != COMPAT:
            assert not private_names(file.read_text()), file


@pytest.mark.parametrize("file", sorted(set(COMPAT.glob("*.py")) - {COMPAT / "__init__.py"}), ids=lambda f: f.stem)
def test_each_file_names_its_versions_and_fallbacks(file):
    assert importlib.import_module(f"nash_mhc.runtime.compat.{file.stem}").SEEN
    text = file.read_text()
    assert "ithout" in text or "otherwise" in text


@pytest.fixture
def without(monkeypatch):
    """Takes a module away, as a later version of its library may."""

    def take(module):
        parent, _, name = module.rpartition(".")
        monkeypatch.delattr(importlib.import_module(parent), name, raising=False)
        monkeypatch.setitem(sys.modules, module, None)

    return take


def test_jax_is_unchanged_without_its_cache_class(without, monkeypatch):
    from jax._src import lru_cache

    monkeypatch.setattr(lru_cache, "LRUCache", type("LRUCache", (), {}))
    compat_jax.write_programs_whole()
    assert not hasattr(lru_cache.LRUCache, "put")
    without("jax._src.lru_cache")
    compat_jax.write_programs_whole()


def test_without_jax_s_distributed_state_only_one_process_runs(without):
    without("jax._src.distributed")
    assert processes.start(MeshConfig()) == 1
    several = MeshConfig(coordinator_address="localhost:1", num_processes=2, process_id=0)
    with pytest.raises(ConfigError, match="start one process"):
        processes.start(several)


def test_heartbeat_callback_is_optional(without, monkeypatch):
    from jax._src.lib import _jax

    made = lambda **options: options
    made.__doc__ = "missed_heartbeat_callback"
    monkeypatch.setattr(_jax, "get_distributed_runtime_client", made)
    called = threading.Event()
    with compat_jax.when_heartbeats_stop(called.set):
        _jax.get_distributed_runtime_client()["missed_heartbeat_callback"]("status")
    assert called.is_set() and _jax.get_distributed_runtime_client is made
    made.__doc__ = None  # of a version that takes none
    with compat_jax.when_heartbeats_stop(called.set):
        assert _jax.get_distributed_runtime_client is made
    without("jax._src.lib")
    with compat_jax.when_heartbeats_stop(called.set):
        pass


def test_attention_uses_public_kernels_without_cudnn_s_primitives(without, monkeypatch):
    # JAX's public form of it needs cuDNN as soon as it is traced.
    monkeypatch.setattr(attend_cudnn, "_masked", lambda rows, window: rows.q_BTNH)
    without("jax._src.cudnn.fused_attention_stablehlo")
    assert not cudnn.is_available() and not cudnn.supports_document_masks()
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    rows = lambda x, segments: AttentionInput(x, x, x, segments, None)

    def found(x):
        (one,) = attend_with_lse((rows(x, None),), windows=(None,), kernels=("cudnn",))
        return one.out_BTNH + attend(x, x, x, kernel="cudnn")

    assert jax.eval_shape(found, x).shape == x.shape


def test_programs_without_cudnn_calls_are_unchanged():
    module = jax.jit(lambda x: x + 1).lower(1.0).compiler_ir("stablehlo")
    before = str(module)
    cudnn.number_backward_passes(module)
    assert str(module) == before


def test_log_sum_exp_is_computed_without_the_passes_of_splash(monkeypatch):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    assert compat_jax.splash_passes() is not None
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 128, 2, 8)), jnp.float32)
    find = lambda name: attend_with_lse((AttentionInput(x, x, x, None, None),), windows=(None,), kernels=(name,))[0]
    plain = find("reference")
    monkeypatch.delattr(kernel, "_splash_attention_bwd")
    assert compat_jax.splash_passes() is None
    for a, b in zip(find("splash"), plain, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_checkpoints_are_written_without_orbax_s_handlers(tmp_path, monkeypatch):
    monkeypatch.delattr(ocp.type_handlers, "register_type_handler")
    with Store(tmp_path) as store:
        store.save(1, {"a": jnp.arange(3)}, {})
        store.wait()
        assert store.restore(1, {"a": jax.ShapeDtypeStruct((3,), jnp.int32)})[0]["a"].tolist() == [0, 1, 2]


def test_raised_errors_are_not_logged_as_well(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    logger = logging.Logger("asyncio")
    monkeypatch.setattr(orbax, "logging", SimpleNamespace(getLogger=lambda name: logger, ERROR=logging.ERROR))
    orbax.log_failures_once(lambda error: isinstance(error, OSError))
    for text in "Event loop is closed", "another":
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(each.exc_value) for each in heard] == ["another"]
    record = lambda error: logging.LogRecord("x", logging.ERROR, "", 0, "text", (), (type(error), error, None))
    assert [bool(logger.filter(record(error))) for error in (OSError(), ValueError())] == [False, True]
    assert logger.filter(logging.LogRecord("x", logging.ERROR, "", 0, "text", (), None))


def test_a_corpus_needs_a_package_index(without, monkeypatch):
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setattr(corpus.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))
    assert corpus._index() == pip.default_index()
    without("pip._internal.models.index")
    with pytest.raises(ConfigError, match="PIP_INDEX_URL"):
        corpus._index()


def test_lm_eval_is_quiet_without_the_replaced_names(monkeypatch, capsys):
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="lm-eval is not installed: pip install 'nash_mhc[eval]'")
    from tqdm.std import tqdm

    monkeypatch.delattr(evaluator, "add_env_info", raising=False)
    monkeypatch.setattr(evaluator, "get_git_commit_hash", before := lambda: "abc")
    with lm_eval.quietly():
        print("noise")
        assert list(tqdm([1])) == [1] and evaluator.get_git_commit_hash() is None
    assert evaluator.get_git_commit_hash is before and capsys.readouterr() == ("", "")
