"""docs/presets.md tells the truth about every size."""

from pathlib import Path

import pytest

from nash_mhc.config import presets
from nash_mhc.model.architectures import count_parameters

PAGE = Path(__file__).parents[2] / "docs" / "presets.md"


@pytest.mark.parametrize("name", presets.sizes())
def test_the_page_has_the_exact_figures(name):
    run = presets.run(name)
    m = run.model
    row = [
        f"`{name}`", f"{count_parameters(m):,}", str(m.width), str(m.layers), f"{m.heads} ({m.kv_heads}) x {m.head_dim}",
        str(m.ffn), f"{m.vocab_size:,}", str(run.data.seq_len), str(m.window),
    ]  # fmt: skip
    assert "| " + " | ".join(row) + " |" in PAGE.read_text()


@pytest.mark.parametrize("name", presets.sizes())
def test_every_size_is_the_full_architecture(name):
    m = presets.model(name)
    assert (m.scales, m.ratio, m.residual, m.streams, m.aggregation) == (2, 16, "mhc-layer", 4, "nash")
