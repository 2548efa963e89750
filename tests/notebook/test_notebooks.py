"""The notebooks, executed from top to bottom with a tiny model, and the package behind them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import jax
import nbformat
import pytest
from command_process import CommandProcess
from runs import losses
from training_process import catches, typed

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.tokenizer import ByteTokenizer
from nash_mhc.loading.load import load
from nash_mhc.notebook.devices import Found, detect, device_sentence, mesh_flags, propose
from nash_mhc.notebook.training import CellError, follow, generate, pack, start
from nash_mhc.runtime.hardware import device_memory, known_memory
from nash_mhc.runtime.signals import TRY_AGAIN

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TRAIN, INSIDE = ROOT / "notebooks" / "train_3b_tpu.ipynb", ROOT / "notebooks" / "look_inside.ipynb"

STEPS, SAVED, ROWS = 40, 20, 3  # the whole run, a checkpoint within it, the rows after which it is stopped
FLAGS = (
    "--model-width 16 --model-layers 2 --model-heads 2 --model-kv-heads 2 --model-head-dim 8 --model-ffn 32 --model-streams 2 "
    "--model-scales 2 --model-ratio 2 --model-window 16 --seq-len 32 --batch-size 8 --log-interval 1 --eval-interval 0 "
    f"--checkpoint-interval {SAVED} --eval-batches 2 --model-nash-iterations 1 --model-conv-taps 0 --sample-tokens 0"
)
_HANGS_S = 900.0  # as in training_process.py


@pytest.fixture(scope="module", autouse=True)
def libraries_of_notebooks():
    """Import slow libraries only in the worker that runs these tests."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    from nash_mhc.notebook import pictures

    globals().update(NotebookClient=NotebookClient, CellExecutionError=CellExecutionError, pictures=pictures)


def execute(notebook, folder, *, meanwhile=None, **env):
    """Run all cells in a kernel with working directory `folder`, and `meanwhile(client)` in a thread."""
    folder.mkdir(exist_ok=True)
    client = NotebookClient(notebook, timeout=_HANGS_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    helper = threading.Thread(target=meanwhile or (lambda _: None), args=(client,), daemon=True)
    helper.start()
    try:
        env = os.environ | {"PYTHONPATH": str(ROOT), "NASH_MHC_FLAGS": FLAGS} | env
        asyncio.run(client.async_execute(env=env))  # `execute` would leave its event loop unclosed
    finally:
        helper.join(_HANGS_S)
        assert not helper.is_alive()
    return notebook


def read(path):
    return nbformat.read(path, as_version=4)


def shown(notebook, kind):
    """Return all outputs of one kind (stream, text/plain, image/png) in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    found = [o.text if o.output_type == "stream" else o.get("data", {}).get(kind) for o in outputs]
    return [text for o, text in zip(outputs, found, strict=True) if text and (o.output_type == "stream") == (kind == "stream")]


def process_of(notebook):
    """Return the id of the training process as soon as a cell shows it."""
    end = time.monotonic() + _HANGS_S
    while time.monotonic() < end:
        for text in shown(notebook, "text/plain"):
            if number := re.match(r"process (\d+):", text):
                return int(number[1])
        time.sleep(0.005)
    raise AssertionError("no process was shown")


def lines_of(path):
    return path.read_text().count("\n") if path.exists() else 0


class Executed(NamedTuple):
    unbroken: Path  # a run
    train: nbformat.NotebookNode  # the notebook that trains, executed where such a run had been stopped ...
    folder: Path  # ... here


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    run, unbroken, steps = folder / "run", folder / "unbroken", {"NASH_MHC_STEPS": str(STEPS)}
    flags = ["--model-size", "tiny", "--total-steps", str(STEPS), *shlex.split(FLAGS)]
    trained = CommandProcess(["-m", "nash_mhc.train", str(unbroken), *flags], folder).end()
    assert trained.returncode == 0, trained.stderr
    shutil.copytree(unbroken, run)
    shutil.rmtree(run / "checkpoints" / str(STEPS))
    return Executed(unbroken, execute(read(TRAIN), folder, NASH_MHC_RUN_FOLDER=str(run), **steps), run)


def test_the_training_notebook_resumes_with_the_same_losses(executed):
    assert losses(executed.folder) == losses(executed.unbroken)
    assert [row[0] for row in losses(executed.folder)] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_stopped_notebook_resumes_and_look_inside_trains_its_own_model(executed, tmp_path):
    run, env = tmp_path / "run", {"NASH_MHC_STEPS": str(STEPS), "NASH_MHC_RUN_FOLDER": str(tmp_path / "run")}

    def stop(client):
        process = process_of(client.nb)
        while lines_of(run / "metrics.jsonl") < ROWS:
            time.sleep(0.005)
        os.kill(process, signal.SIGTERM)

    with pytest.raises(CellExecutionError) as ended:
        execute(read(TRAIN), tmp_path, meanwhile=stop, **env)
    saved = rf"stopped: step (\d+) is saved in {re.escape(str(run))}; .*nash_mhc\.train {re.escape(str(run))}"
    assert re.fullmatch(rf"{saved}   # or run this cell again", ended.value.evalue)
    assert ROWS <= len(losses(run)) < STEPS
    execute(read(TRAIN), tmp_path, **env)
    assert losses(run) == losses(executed.unbroken)
    execute(read(INSIDE), tmp_path, **env | {"NASH_MHC_RUN_FOLDER": str(tmp_path / "alone")})
    assert losses(tmp_path / "alone") == losses(executed.unbroken)


def test_the_outputs_of_the_training_notebook(executed, tmp_path):
    text = shown(executed.train, "stream")
    assert re.match(r"This is a CPU with [\d.]+ cores?: there is no accelerator.\nProposed: tiny on a 1x1x1 mesh", text[2])
    assert re.match(rf"\S*python\S* -m nash_mhc.train {executed.folder} --model-size tiny --mesh-data 1 ", text[3])
    assert text[4].startswith("Once ")
    assert "scale_entropy        layer by layer: [0." in text[5]
    (status,) = [line for line in shown(executed.train, "text/plain") if line.startswith("done")]
    assert re.fullmatch(rf"done: step {STEPS}, loss \d\.\d{{4}}, [\d,]+ tokens/s", status)
    assert len(shown(executed.train, "image/png")) == 2  # curves that were drawn again and again, and the health
    with zipfile.ZipFile(executed.folder.parent / "nash_mhc-run.zip") as archive:
        archive.extractall(tmp_path)
    loaded = load(tmp_path / "run")
    assert (loaded.step, loaded.config.model.width) == (STEPS, 16)
    assert json.loads((tmp_path / "transformers" / "config.json").read_text())["model_type"] == "nash_mhc"
    assert (tmp_path / "transformers" / "model.safetensors").stat().st_size > 1000


@pytest.mark.long
def test_the_printed_commands_run(executed, tmp_path):
    code, out = typed(shown(executed.train, "stream")[3], executed.folder.parent)
    assert code == 0, out
    with zipfile.ZipFile(executed.folder.parent / "nash_mhc-run.zip") as archive:
        archive.extractall(tmp_path)
    (said,) = [cell.source for cell in read(TRAIN).cells if "is the same model for Hugging Face" in cell.source]
    commands = re.findall(r"`python( -m \S+) FOLDER`", said)
    assert commands
    for command in commands:
        code, out = typed(f"{sys.executable}{command} run", tmp_path)
        assert code == 0, out


@pytest.mark.long
def test_look_inside_shows_all_figures(executed, tmp_path):
    inside = execute(read(INSIDE), tmp_path, NASH_MHC_TEXT="Once Mira lived.", NASH_MHC_RUN=str(executed.unbroken))
    told = f"step {STEPS} of {executed.unbroken}: 2 layers, 2 scales, 2 heads; the text has 17 tokens\n"
    assert shown(inside, "stream") == [told]
    assert len(shown(inside, "image/png")) == 6


@pytest.mark.long
def test_interrupting_the_cell_sends_one_signal_to_the_run(tmp_path):
    """A second signal would stop the run without saving."""
    cell = "from nash_mhc.notebook import training\ntraining.follow(training.start('run', []))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])

    def interrupt(client):
        process = process_of(notebook)
        while not catches(process, signal.SIGTERM):
            time.sleep(0.001)
        os.killpg(os.getpgid(client.km.provisioner.pid), signal.SIGINT)

    with pytest.raises(CellExecutionError) as ended:
        execute(notebook, tmp_path, meanwhile=interrupt)
    told = "SIGTERM: nothing is lost; start the same command again   # or run this cell again"
    assert (ended.value.ename, ended.value.evalue, ended.value.traceback.count("Traceback")) == ("CellError", told, 0)


def test_an_early_interrupt_stops_the_run(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        while not catches(training.process.pid, signal.SIGTERM):
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr("IPython.display.display", interrupted)
    training = start(str(tmp_path / "run"), [])
    assert os.getpgid(training.process.pid) != os.getpgrp()  # what interrupts the cell's processes leaves it alone
    with pytest.raises(CellError, match="SIGTERM: nothing is lost"):
        follow(training)
    assert training.process.poll() == TRY_AGAIN


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path):
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert path.read_text() == nbformat.writes(read(path)) + "\n"
    first, *_ = notebook["cells"]
    assert "".join(first["source"]).startswith("# ")


def test_both_notebooks_are_there():
    assert NOTEBOOKS == [INSIDE, TRAIN]


CHIP, V6E = 33_550_000_000, "TPU v6 lite"  # bytes of a v6e that a program may use, and what JAX calls it


@pytest.mark.parametrize(
    ("found", "sentence", "size", "mesh", "batch"),
    [
        (Found("cpu", "cpu", 1, None, 2.0), "This is a CPU with 2 cores: there is no accelerator.", "tiny", "1x1x1", (8, 1)),
        (Found("tpu", V6E, 1, CHIP, 44.0), "This is one TPU v6 lite chip with 31.2 GiB; {}", "1b", "1x1x1", (2, 4)),
        (Found("tpu", V6E, 8, CHIP, 180.0), "These are 8 TPU v6 lite chips with 31.2 GiB each.", "3b", "2x2x2", (8, 1)),
        (Found("tpu", V6E, 4, CHIP, 180.0), "These are 4 TPU v6 lite chips with 31.2 GiB each.", "3b", "1x4x1", (4, 2)),
        (Found("gpu", "H200", 1, 113 * 10**9, 16.0), "This is one H200 GPU with 105.2 GiB; {}", "3b", "1x1x1", (2, 4)),
        (Found("gpu", "X", 1, None, 1.0), "This is one X GPU; {}", "tiny", "1x1x1", (8, 1)),
        (Found("gpu", "X", 1, 2**30, 1.0), "This is one X GPU with 1.0 GiB; {}", "tiny", "1x1x1", (8, 1)),
    ],
)
def test_the_proposal_fits_the_devices(found, sentence, size, mesh, batch):
    proposal = propose(found)
    assert device_sentence(found) == proposal.sentence == sentence.format("a 2x2x2 mesh needs eight.")
    assert (proposal.size, proposal.mesh, (proposal.batch_size, proposal.grad_accum)) == (size, mesh, batch)


def test_known_chips_have_a_memory_size():
    assert [known_memory(kind) for kind in (V6E, "TPU v5 lite", "TPU v5p", "X")] == [32 * 10**9, 16 * 10**9, 95 * 10**9, None]
    assert device_memory(jax.devices("cpu")[0]) is None


def test_notebook_errors_are_one_line(tmp_path, monkeypatch):
    assert mesh_flags("2x-1x1") == ["--mesh-data", "2", "--mesh-fsdp", "-1", "--mesh-tp", "1"]
    for wrong in ("2x2", "axbxc", "0x1x1", ""):
        with pytest.raises(ConfigError, match=r"three numbers, .*2x2x2") as error:
            mesh_flags(wrong)
        assert error.value._render_traceback_() == [f"error: {error.value}"]
    with pytest.raises(CellError, match="no folder given"):
        start(" ", [])
    with pytest.raises(CellError, match="no complete checkpoint"):
        pack(str(tmp_path), str(tmp_path / "a.zip"))
    with pytest.raises(CellError, match=r"^error: --max-tokens"):
        generate(str(tmp_path), "--max-tokens", "some")
    with pytest.raises(ConfigError, match="no health/scale_entropy"):
        pictures.health([{"step": 1, "loss": 1.0}])
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(ConfigError, match=r"cannot detect the devices: .*nonsense"):
        detect()


def test_token_labels_and_selected_layers():
    assert pictures.labels([256, 65, 10, 36], ByteTokenizer()) == ["|", "A", "\\n", "\\$"]
    assert pictures._some(2) == [0, 1]
    assert pictures._some(28) == [0, 5, 11, 16, 22, 27]
