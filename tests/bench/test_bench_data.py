"""`bench data` measures the real parts."""

import pytest
import small

from nash_mhc.bench import data
from nash_mhc.bench.data import bench_data, make_texts, targets


@pytest.mark.long
def test_bench_data_measures_every_part(monkeypatch):
    monkeypatch.setattr(data, "_SECONDS", 0.2)  # of reading
    monkeypatch.setattr("nash_mhc.train.inputs.open_held_out", lambda *_, **__: None)  # nobody looks at an evaluation
    figures = bench_data(small.config(data__batch_size=32), megabytes=1, steps=4)
    assert figures["rows"] > 1000
    assert 0 < figures["padding"] < 0.1  # rows of 32 tokens, so many documents are cut
    for name in ("read_tokens_per_s", "prepare_tokens_per_s", "library_tokens_per_s", "prepare_bytes_per_s"):
        assert figures[name] > 1000
    assert figures["share_of_library"] == figures["prepare_tokens_per_s"] / figures["library_tokens_per_s"]
    assert 0 <= figures["data_wait_share"] < 1
    # A command alone takes more than 20 MiB; four times the text hardly more than once.
    assert figures["read_memory_mib"] > 20
    assert figures["read_memory_mib_of_4x"] < 1.2 * figures["read_memory_mib"]


def test_targets_of_data():
    good = "5 million tokens/s: met; 0.8 of the library: met; waiting under 2% of a step: met"
    assert targets(5e6, 0.8, 0.0199) == good
    assert targets(4.9e6, 0.79, 0.02) == good.replace("met", "NOT met")


def test_made_text_is_ordinary_text():
    texts = list(make_texts(200_000))
    assert texts == list(make_texts(200_000))
    assert 200_000 <= sum(map(len, texts)) < 210_000 + max(map(len, texts))
    lengths = sorted(map(len, texts))
    assert lengths[-1] > 10 * lengths[0]
