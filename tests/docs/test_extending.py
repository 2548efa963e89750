"""docs/extending.md is a program: it runs from top to bottom, as it stands in the page, and does what the page says."""

import math
import re
from pathlib import Path

import pytest

from nash_mhc.config import kits
from nash_mhc.config.schema import ARCHITECTURES
from nash_mhc.data.documents import files
from nash_mhc.model import architectures
from nash_mhc.objectives import registry
from nash_mhc.optim import optimizers
from nash_mhc.parallel import sharding

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def nothing_stays_registered(monkeypatch):
    monkeypatch.setattr(architectures, "_KNOWN", dict(architectures._KNOWN))
    monkeypatch.setattr(registry, "OBJECTIVES", registry.OBJECTIVES.copy())
    monkeypatch.setattr(optimizers, "OPTIMIZERS", optimizers.OPTIMIZERS.copy())
    monkeypatch.setenv(kits.OUTSIDE, "")
    monkeypatch.setattr(files, "FORMATS", dict(files.FORMATS))
    monkeypatch.setitem(sharding.RULES, "batch", sharding.RULES["batch"])  # put back afterwards
    yield
    for kind in ("bigram", "adapted"):
        ARCHITECTURES.pop(kind, None)


def test_every_example_runs_as_it_stands(nothing_stays_registered, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    headings = [part.partition("\n")[0] for part in text.split("\n## ")[1:]]
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == len(headings) + 1  # what all share, and one each
    namespace = {"__name__": "extending"}
    for number, block in enumerate(blocks):
        source = "\n" * text[: text.index(block)].count("\n") + block  # a traceback then has the page's own lines
        exec(compile(source, str(PAGE), "exec"), namespace)
        said = capsys.readouterr().out.split()
        if number:
            assert math.isfinite(float(said[-1])), headings[number - 1]
    assert namespace["trained"].state.model.cfg.architecture == "bigram"
    assert namespace["largest"].norm > 0
