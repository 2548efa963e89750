"""The cell that installs the package, run with git and pip in an environment without it."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
CELLS = [
    cell for cell in nbformat.read(ROOT / "notebooks" / "train_3b_tpu.ipynb", as_version=4).cells if cell.cell_type == "code"
]
CELL = "\n".join(cell.source for cell in CELLS[:2])


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment without the package, with this one's pip and setuptools."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # whose own .pth files are not read
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small git repository named like the package."""
    folder = tmp_path_factory.mktemp("origin") / "nash_mhc"
    (folder / "nash_mhc").mkdir(parents=True)
    (folder / "nash_mhc" / "__init__.py").write_text("__version__ = '7.0'\n")
    extras = "".join(f"{name} = []\n" for name in ("notebook", "gcs", "hf", "tpu", "cuda"))
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "nash_mhc"\n'
        f'version = "7.0"\n[project.optional-dependencies]\n{extras}[tool.setuptools.packages.find]\ninclude = ["nash_mhc*"]\n'
    )
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


def run(python, folder, *, then="", **env):
    """Run the cell in that folder; return (exit code, output). pip needs no network."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "PIP_"))}
    env = clean | {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"} | env
    done = subprocess.run(
        [python, "-c", f"{CELL}\n{then}"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_without_a_clone_the_cell_asks_for_repo(python, tmp_path):
    code, out = run(python, tmp_path)
    assert code == 1 and "fill in REPO" in out and "Traceback" not in out
    assert list(tmp_path.iterdir()) == []


def test_the_cell_uses_an_existing_clone_after_a_failure(python, source, tmp_path):
    """The clone of a failed installation would hide the installed package without PYTHONPATH."""
    subprocess.run(["git", "clone", "-q", str(source), str(tmp_path / "nash_mhc")], check=True)
    code, out = run(python, tmp_path, PIP_RETRIES="some")  # which is no number
    assert code == 1 and "failed, see above" in out
    assert re.search(r"\$ .*-m pip install -e .*/nash_mhc\[.*notebook,gcs,hf\]\n", out)
    child = f"subprocess.run([{str(python)!r}, '-c', 'import nash_mhc; print(nash_mhc.__file__)'], check=True)"
    code, out = run(python, tmp_path, then=child)
    assert code == 0 and "Successfully installed nash_mhc" in out, out
    assert "nash_mhc 7.0\n" in out and out.endswith(f"{tmp_path}/nash_mhc/nash_mhc/__init__.py\n")


@pytest.mark.long
def test_an_interrupted_clone_is_repeated(python, source, tmp_path):
    (tmp_path / "nash_mhc_source" / ".git").mkdir(parents=True)
    subprocess.run([python, "-m", "pip", "-q", "uninstall", "-y", "nash_mhc"], check=False, capture_output=True)
    code, out = run(python, tmp_path, NASH_MHC_REPO=str(source))
    assert code == 0 and out.endswith("nash_mhc 7.0\n"), out


@pytest.mark.parametrize(("version", "extra"), [("12.4", "cuda12"), ("13.0", "cuda")])
def test_an_older_driver_selects_the_older_cuda_extra(tmp_path, version, extra):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '| Driver Version: 1 CUDA Version: {version} |'\n")
    smi.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code = f"import glob\nglob.glob = lambda _: []  # no TPU here\n{CELLS[0].source}\nprint(EXTRA)"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[0] == "Found an NVIDIA GPU." and out.split()[-1] == extra
