"""Kits: a folder outside of the package that `--kit` loads, a package without its kits, a registered data source."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_process import CommandProcess
from outside_kit import outside_kit

from nash_mhc.config import kits, parsing
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, RunConfig
from nash_mhc.data import sources
from nash_mhc.data.pack import Rows, RowSource
from nash_mhc.loading.load import load
from nash_mhc.report.contents import open_run
from nash_mhc.report.page import write_page
from nash_mhc.train import run
from nash_mhc.train.inferred_settings import infer_settings

ROOT = Path(__file__).parent.parent

INIT = """
from nash_mhc.config.kits import Figure, Kit

KIT = Kit(
    model_kinds={"unigram": "settings:UnigramConfig"},
    architectures={"unigram": "model:ARCHITECTURE"},
    presets={"unigram": "settings:PRESETS"},
    sections={"coldness": "settings:ColdnessConfig"},
    objectives={"cold": "model:COLD"},
    optimizers={"sign": "model:sign"},
    figures={"factor": Figure("held-out factor", "{:.1f}", "factor", line=", factor {eval/factor:.0f}")},
)
"""

SETTINGS = """
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, key
from nash_mhc.config.schema import ArchitectureConfig, DataConfig, OptimConfig, RunConfig, TelemetryConfig, TrainConfig


@dataclass(frozen=True)
class UnigramConfig(ArchitectureConfig):
    architecture = "unigram"
    vocab_size: int = key(257, "tokens in the vocabulary", low=2)
    width: int = key(16, "width of the table", low=1)


@dataclass(frozen=True)
class ColdnessConfig(Section):
    section, prefixed, about = "coldness", True, "a loss of sharper logits"
    factor: float = key(1.0, "factor of the logits in the loss", above=0)

    def check_run(self, run):
        if run.objective.name != "cold":
            raise ConfigError("--coldness-factor is for --objective cold")


PRESETS = {
    name: RunConfig(
        model_size=name, model=UnigramConfig(width=width), data=DataConfig(seq_len=32, batch_size=8),
        optim=OptimConfig(warmup_steps=1), train=TrainConfig(total_steps=4, eval_batches=1),
        telemetry=TelemetryConfig(sample_tokens=0),
    )
    for name, width in (("tiny", 16), ("less-tiny", 32))
}
"""

MODEL = """
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from nash_mhc.model.parts import init_matrix
from nash_mhc.model.protocol import Architecture, Execution
from nash_mhc.objectives.base import Aux, Sum
from nash_mhc.objectives.registry import ObjectiveKind
from nash_mhc.objectives.vocabulary import sharded_xent
from nash_mhc.parallel.params import TABLE, param

from .settings import ColdnessConfig, UnigramConfig


class Unigram(eqx.Module):
    embed_VD: jax.Array = param("vocab", "embed", role=TABLE)
    cfg: UnigramConfig = eqx.field(static=True)

    @staticmethod
    def init(cfg, *, key):
        return Unigram(init_matrix(key, (cfg.padded_vocab, cfg.width), cfg.width), cfg)

    @property
    def unembed_VD(self):
        return self.embed_VD

    def hidden(self, tokens_BT, segments_BT=None, execution=Execution()):
        return self.embed_VD.astype(execution.dtype)[tokens_BT], None

    def health(self, report):
        return {}

    def auxiliary_losses(self, report):
        return {}


def decode(model, cache, tokens_B):
    logits_BV = model.embed_VD[tokens_B] @ model.embed_VD.T
    return logits_BV[:, : model.cfg.vocab_size].astype(jnp.float32), cache


ARCHITECTURE = Architecture(
    init=Unigram.init,
    flops_per_token=lambda cfg, seq_len: 6.0 * cfg.vocab_size * cfg.width,
    empty_cache=lambda cfg, batch, seq_len, dtype: jnp.zeros(()),
    decode=decode,
)


def make_cold(cfg, execution):
    factor = cfg.section(ColdnessConfig).factor

    def cold(model, batch):
        x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
        out = sharded_xent(factor * x_BTD, model.unembed_VD, batch.targets, batch.weights, model.cfg.vocab_size, 0.0)
        sums = {"loss": Sum(out.loss, out.weight), "factor": Sum(factor * out.weight, out.weight)}
        return out.loss, Aux(sums, model.health(report))

    return cold


COLD = ObjectiveKind(make_cold, examples="text")


def sign(h, model):
    return optax.scale_by_sign()
"""


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A kit outside of the package, unloaded afterwards."""
    files = {"__init__.py": INIT, "settings.py": SETTINGS, "model.py": MODEL}
    with outside_kit(tmp_path / "elsewhere" / "chilly", files, monkeypatch) as folder:
        yield folder


def python(*words, cwd, **env):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        check=False,
    )  # fmt: skip


def test_a_kit_outside_of_the_package_brings_all_that_it_names(kit, tmp_path):
    """Proof (e) of the structure: files are added, and nothing of the package changes."""
    flags = ["--kit", str(kit), "--model-kind", "unigram", "--model-size", "less-tiny", "--objective", "cold"]
    flags += ["--coldness-factor", "2", "--optimizer", "sign", "--checkpoint-dir", str(tmp_path / "run")]
    train = lambda *flags: CommandProcess(["-m", "nash_mhc.train", *flags], tmp_path, **{kits.OUTSIDE: None}).end()
    done = train(*flags)
    assert done.returncode == 0, done.stderr
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["config"]["kit"] == str(kit)
    assert info["config"]["coldness"] == {"factor": 2.0} and info["config"]["model"]["width"] == 32
    assert ", factor 2" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/factor"] == 2.0
    # Other processes know it by the run alone: they resume, write and report.
    resumed = train(str(tmp_path / "run"), "--total-steps", "6")
    assert resumed.returncode == 0 and "step 6" in resumed.stdout.replace("  ", " "), resumed.stdout + resumed.stderr
    assert isinstance(load(str(tmp_path / "run"), None).model.cfg, ArchitectureConfig)  # what `generate` opens
    write_page([open_run(str(tmp_path / "run"))], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    moved = kit.rename(kit.with_name("moved"))
    refused = train(str(tmp_path / "run"))
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and f"--kit {kit}" in refused.stderr
    moved.rename(kit)
    assert '"held-out factor": "2.0"' in page.replace('":"', '": "') and '["factor","factor",false]' in page.replace(", ", ",")


def test_names_of_a_kit_are_known_to_flags_help_and_yaml(kit, tmp_path, capsys):
    kits.use(str(kit))
    assert parsing.parse(["--model-kind", "unigram", "--coldness-factor", "2", "--objective", "cold"]).config.model.width == 16
    with pytest.raises(SystemExit):
        parsing.parse(["--help", "coldness"])
    assert "--coldness-factor FLOAT" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean --coldness-factor"):
        parsing.parse(["--coldnes-factor", "2"])
    with pytest.raises(ConfigError, match="--coldness-factor is for --objective cold"):
        parsing.parse(["--coldness-factor", "2"])
    (tmp_path / "run.yaml").write_text(f"kit: {kit}\nobjective:\n  name: cold\ncoldness:\n  factor: 3\n")
    parsed = parsing.parse(["--config", str(tmp_path / "run.yaml")])
    assert parsing.render(parsed.config, parsed.origins).count("coldness:\n  factor: 3.0") == 1
    assert RunConfig.from_dict(parsed.config.to_dict()) == parsed.config
    assert hash(parsed.config) == hash(RunConfig.from_dict(parsed.config.to_dict()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"--kit .*chilly: .*__init__\.py .*KIT"),
        ("", r"--kit .*chilly: cannot be loaded \(AttributeError: .*KIT"),
        ("import nowhere_at_all", r"--kit .*chilly: cannot be loaded \(ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_a_folder_that_is_no_kit_is_one_line(kit, text, message):
    (kit / "__init__.py").unlink()
    if text is not None:
        (kit / "__init__.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        parsing.parse(["--kit", str(kit)])
    assert os.environ[kits.OUTSIDE] == ""
    parsing.parse([])  # and leaves nothing behind


def test_a_run_whose_kit_moved_says_so(kit):
    with pytest.raises(ConfigError, match=r"--kit /moved/chilly: .* with --kit"):
        RunConfig.from_dict({"kit": "/moved/chilly"})
    kits.use(str(kit))
    RunConfig.from_dict({"kit": "/moved/chilly"})  # loaded from elsewhere


SMALL = (
    "--model-layers 1 --model-width 32 --model-ffn 64 --seq-len 64 --batch-size 2 --total-steps 2 --warmup-steps 1 "
    "--eval-batches 1 --sample-tokens 0 --model-scales 1 --model-window none --model-residual plain --model-conv-taps 0"
).split()


@pytest.mark.long
def test_the_core_trains_without_a_kit(tmp_path):
    shutil.copytree(
        ROOT / "nash_mhc", tmp_path / "nash_mhc", ignore=shutil.ignore_patterns("__pycache__", "recursive", "quantize", "hub")
    )
    done = python("-m", "nash_mhc.train", *SMALL, "--checkpoint-dir", "./run", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and str(tmp_path) not in done.stderr, done.stderr


ASKED = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]  # would find the whole package
from nash_mhc.config import kits, parsing

assert parsing.parse([]).config.model_kind == "nash-mhc"
try:
    parsing.parse(["--model-kind", "recursive"])
except parsing.ConfigError as error:
    print(list(kits.all_kits()), error)
"""


@pytest.mark.parametrize(("gone", "left"), [("recursive", "reservoir"), ("kits", "")])
def test_what_a_deleted_kit_had_is_refused_in_one_line(gone, left, tmp_path):
    shutil.copytree(ROOT / "nash_mhc", tmp_path / "nash_mhc", ignore=shutil.ignore_patterns("__pycache__", gone))
    done = python("-c", ASKED, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and left in done.stdout and "recursive" not in done.stdout.split("]")[0], done
    assert len(done.stdout.splitlines()) == 1 and "must be one of nash-mhc" in done.stdout


# Train as an earlier version would: run.json and the checkpoints have the sections of all kits.
AS_BEFORE = """
import runpy, sys
from nash_mhc.config.schema import RunConfig

RunConfig.recorded = RunConfig.to_dict
sys.modules.pop("nash_mhc.train.__main__", None)
runpy.run_module("nash_mhc.train", run_name="__main__")
"""

# Run several commands in one interpreter, whose imports take seconds; print [exit code, stdout, stderr] of each.
COMMANDS = """
import contextlib, io, json, os, runpy, sys

os._exit = sys.exit  # a failing command would end the whole process
ended = []
for module, *flags in json.loads(sys.argv[1]):
    sys.argv, code = [module, *flags], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_module(f"nash_mhc.{module}", run_name="__main__", alter_sys=True)
        except SystemExit as stopped:
            code = stopped.code or 0
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def older_run(tmp_path_factory):
    """A run that used no kit, recorded by an earlier version."""
    folder = tmp_path_factory.mktemp("older")
    run, script = folder / "run", folder / "as_before.py"
    script.write_text(AS_BEFORE)
    done = CommandProcess([str(script), *SMALL, "--checkpoint-dir", str(run)], folder).end()
    assert done.returncode == 0, done.stderr
    assert {"distill", "quantize"} <= json.loads((run / "run.json").read_text())["config"].keys()
    return run


@pytest.fixture(scope="module")
def without_kits(tmp_path_factory):
    """Return a function that runs commands with a package whose kits were deleted, all but reservoir."""
    root = tmp_path_factory.mktemp("package")
    gone = shutil.ignore_patterns("__pycache__", "distill", "hub", "quantize", "recursive")
    shutil.copytree(ROOT / "nash_mhc", root / "nash_mhc", ignore=gone)

    def run(*commands):
        done = python("-c", COMMANDS, json.dumps(commands), cwd=root, PYTHONPATH=str(root))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_run_that_used_no_kit_continues_without_the_kits(older_run, without_kits, tmp_path):
    run = str(shutil.copytree(older_run, tmp_path / "run"))
    resumed, *others, asked = without_kits(
        ("train", run, "--total-steps", "4"),
        ("generate", run, "--max-tokens", "2"),
        ("report", run, "--out", str(tmp_path / "page.html")),
        ("train", "--config", str(older_run / "run.json"), "--print-config"),
    )
    assert resumed[0] == 0 and "step 4" in resumed[1].replace("  ", " "), resumed
    assert [code for code, _, _ in others] == [0, 0], others
    assert asked[0] == 0 and "width: 32" in asked[1], asked
    assert not {"distill", "quantize"} & json.loads((tmp_path / "run" / "run.json").read_text())["config"].keys()


USED = [("quantize", "weights", "q2a4"), ("distill", "temperature", 2.0), ("", "model_kind", "recursive")]


def test_runs_that_used_a_deleted_kit_are_refused_in_one_line(older_run, without_kits, tmp_path):
    commands = []
    for number, (section, key, value) in enumerate(USED):
        info = json.loads((older_run / "run.json").read_text())
        for values in (info["config"], info["settings"]):
            (values[section] if section else values)[key] = value
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.json").write_text(json.dumps(info))
        commands += [(module, str(tmp_path / str(number))) for module in ("train", "generate")]
    for (_, folder), (code, _, err) in zip(commands, without_kits(*commands), strict=True):
        section, _, value = USED[int(Path(folder).name)]
        assert code == 2 and len(err.splitlines()) == 1, err
        assert folder in err and (section or value) in err and "kit" in err


def test_without_its_kit_a_hugging_face_model_is_refused_in_one_line(without_kits, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for code, _, err in without_kits(("generate", str(tmp_path)), ("train", "--init-from", str(tmp_path))):
        assert code == 2 and len(err.splitlines()) == 1, err
        assert f"{tmp_path}: contains neither a run nor a model" in err


def test_importing_the_core_imports_no_kit():
    """Not even by way of a registry: kits are imported when one of their names is looked up."""
    text = "import sys, nash_mhc.train.trainer; print([name for name in sys.modules if name.startswith('nash_mhc.kits.')])"
    loaded = python("-c", text, cwd=ROOT).stdout.strip()
    modules = [name for name in eval(loaded) if name.count(".") > 2]
    assert modules == [], modules


def test_a_data_source_of_numpy_arrays_is_registered_from_python(tmp_path, monkeypatch):
    """Proof (d) of the structure."""
    monkeypatch.setattr(sources, "SOURCES", sources.SOURCES.copy())
    sources.SOURCES["counting"] = sources.DataSource(
        takes=lambda dataset, form: dataset == "counting",
        open=lambda asked: Arrays(np.arange(64 * 65).reshape(64, 65) % 7, asked.seed),
        infers=lambda values: {"data.seq_len": (64, "counting")},
    )
    flags = [*SMALL, "--dataset", "counting", "--learning-rate", "1e-2"]
    flags[flags.index("--total-steps") + 1] = "8"
    cfg = parsing.parse([*flags, "--checkpoint-dir", str(tmp_path / "run")], found=infer_settings).config
    result = run(cfg, quiet=True)
    assert result.evaluation["eval/loss"] < 5.0  # log 257 = 5.5: it has begun to count


class Arrays(RowSource):
    """Rows of a table of tokens, read again and again."""

    name, identity, most_documents = "counting", "counting-1", 1

    def __init__(self, table, seed):
        self.table, self.seed = table.astype(np.int32), seed

    def take(self, indices):
        rows = self.table[np.asarray(indices) % len(self.table)]
        ones = np.ones_like(rows[:, 1:])
        return Rows(rows[:, :-1], rows[:, 1:], ones, ones.astype(np.float32))
