"""The page about a run: complete, self-contained, honest about what is missing."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.report.__main__ import main
from nash_mhc.report.charts import chart
from nash_mhc.report.page import facts, open_run, page

CHARTS = [
    "loss",
    "learning rate",
    "gradient norm",
    "token accuracy",
    "tokens a second",
    "ms a step",
    "ms a step waiting for data",
]


def make_run(folder: Path, rows: list[dict[str, Any]], evals: list[dict[str, Any]] = [], **info: Any) -> Path:  # noqa: B006
    """The files of a run, as training writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "config": RunConfig().to_dict(),
        "parameters": 475840,
        "mesh": {"data": 2, "fsdp": 2, "tp": 1},
        "devices": {"platform": "cpu", "kind": "cpu", "count": 4},
        "versions": {"jax": "0.10.2"},
        "floor": {"nats_per_token": 0.5, "bits_per_byte": 0.75},
    }
    (folder / "run.json").write_text(json.dumps(described | info))
    for name, found in (("metrics.jsonl", rows), ("eval.jsonl", evals)):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in found))
    return folder


def row(step: int, **values: Any) -> dict[str, Any]:
    base = {"step": step, "loss": 8 / step, "lr": 0.001, "grad_norm": 1.5, "accuracy": 0.4, "tokens_per_s": 1000.0 * step}
    return base | {"mfu": 0.25, "tokens_seen": 64 * step, "step_ms": 12.0, "data_wait_ms": 0.5} | values


EVAL = {"step": 4, "eval/loss": 2.0, "eval/bits_per_byte": 2.885, "eval/accuracy": 0.45, "eval/perplexity": 7.39}


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, argv)])
    code = one_line_errors(main)
    out, err = capsys.readouterr()
    return code, out, err


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.found if name == tag]


def test_facts_are_those_of_the_files(tmp_path: Path) -> None:
    found = facts(open_run(make_run(tmp_path / "r", [row(1), row(2), row(4, tokens_per_s=None)], [EVAL])))
    assert found == {
        "parameters": "475,840",
        "device": "4 x cpu",
        "mesh": "2x2x1 (data x fsdp x tp)",
        "steps": "4 of 300",
        "tokens seen": "256",
        "final loss, nats a token": "2.0000",
        "held-out loss, nats a token": "2.0000",
        "held-out bits a byte": "2.8850",
        "floor, nats a token": "0.5000",
        "floor, bits a byte": "0.7500",
        "held-out loss / floor": "4.000x",
        "tokens a second (median)": "1,500",
        "MFU (median)": "25.0%",
    }


def test_page_is_whole_and_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a <b> run", [row(s) for s in (1, 2, 3, 4)], [EVAL])
    code, out, err = command(monkeypatch, capsys, folder)
    assert (code, err) == (0, "")
    assert out.endswith(f"report: {folder / 'report.html'}\n")
    assert re.search(r"^held-out loss / floor +4\.000x$", out, re.M)
    text = (folder / "report.html").read_text()
    elements = Elements(text)
    assert [svg["aria-label"] for svg in elements.of("svg")] == CHARTS
    assert "<b>" not in text
    assert "a &lt;b&gt; run" in text
    assert not elements.of("script") + elements.of("link") + elements.of("img")
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text
    assert "stroke-dasharray" in text
    assert text.count('class="floor"') == 1
    assert "held out at step 4: 2.0000" in text
    assert "<td>optim.learning_rate</td><td>0.0012</td>" in text
    assert "<td>model.window</td><td>none</td>" in text
    assert sorted(p.name for p in folder.iterdir()) == ["eval.jsonl", "metrics.jsonl", "report.html", "run.json"]


@pytest.mark.parametrize(("count", "note"), [(0, "no rows of metrics"), (1, "1 row of metrics")])
def test_a_run_that_has_hardly_begun(
    count: int, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path, [row(20)] * count)
    (folder / "eval.jsonl").unlink()
    code, out, err = command(monkeypatch, capsys, folder, "--out", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert note in out
    text = (tmp_path / "page.html").read_text()
    assert len(Elements(text).of("svg")) == (len(CHARTS) if count else 0)
    assert text.count("no values yet") == (0 if count else len(CHARTS))
    assert "nan" not in text.lower()


def numbers(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]


def line_of(svg: str, css: str = "train") -> str:
    return str(next(p["d"] for p in Elements(svg).of("path") if p["class"] == css))


def test_missing_values_are_gaps() -> None:
    path = line_of(chart("x", [(1.0, 1.0), (2.0, 2.0), (3.0, None), (4.0, 1.0), (5.0, None), (6.0, 2.0), (7.0, 2.0)]))
    assert path.count("M") == 3
    assert path.count("L") == 2
    assert len(numbers(path)) == 5


def test_nan_and_text_in_a_row_are_gaps_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [row(1), row(2, loss=float("nan"), grad_norm="?"), row(3, loss=float("inf")), row(4)])
    text = page(open_run(folder))
    assert line_of(text).count("M") == 2
    assert not re.search(r'[dxy]="[^"]*(nan|inf)', text)


def test_what_is_measured_layer_by_layer_is_left_aside(tmp_path: Path) -> None:
    """Rows of a whole model hold lists; the page is that of the same rows without them."""
    health = {"health/gain_forward": [1.0, 1.01], "health/scale_weight": [[0.5, 0.5], [0.25, None]], "loss/sparsity": 0.0}
    plain, listed = ([row(s, **more) for s in (1, 2, 3)] for more in ({}, health))
    runs = [open_run(make_run(tmp_path / "r", rows, [EVAL])) for rows in (plain, listed)]
    assert page(runs[1]) == page(runs[0])
    # Even where a number is expected: a gap, not a failure.
    assert "no values yet" in page(open_run(make_run(tmp_path / "odd", [row(1, grad_norm=[1.0]), row(2, grad_norm=[2.0])])))


def test_points_lie_where_their_values_say() -> None:
    (xa, ya), (xb, yb), (xc, yc) = numbers(line_of(chart("x", [(0.0, 0.0), (5.0, 5.0), (10.0, 10.0)])))
    assert xb == pytest.approx((xa + xc) / 2, abs=0.11)
    assert yb == pytest.approx((ya + yc) / 2, abs=0.11)
    assert xa < xc
    assert ya > yc  # up is more


def test_a_loss_that_falls_far_is_drawn_logarithmically() -> None:
    svg = chart("loss", [(1.0, 8.0), (2.0, 4.0), (3.0, 2.0)], floor=1.0, big=True)
    ys = [y for _, y in numbers(line_of(svg))]
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.11)
    assert "log scale" in svg
    assert "log scale" not in chart("loss", [(1.0, 2.0), (2.0, 1.9)], big=True)


def test_a_long_run_keeps_its_spikes_and_stays_small() -> None:
    points: list[tuple[float, float | None]] = [(float(i), 1000.0 if i == 13_333 else 1.0 + i % 7) for i in range(20_000)]
    svg = chart("x", points)
    drawn = numbers(line_of(svg))
    assert len(svg) < 40_000
    assert min(y for _, y in drawn) < 20  # the spike is the only one up there
    assert sum(y < 100 for _, y in drawn) == 1


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [-3.0, -3.0], [1e30, 1.0], [1e-9, 2e-9], [-5.0, 4.0]])
@pytest.mark.parametrize("big", [True, False])
def test_any_range_has_ticks_and_stays_inside(values: list[float], big: bool) -> None:
    svg = chart("x", [(float(i), v) for i, v in enumerate(values)], big=big)
    height = float(str(Elements(svg).of("svg")[0]["viewbox"]).split()[-1])
    assert all(0 <= y <= height for _, y in numbers(line_of(svg)))
    assert 1 <= svg.count('class="grid"') <= 40


def test_a_half_written_last_line_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [row(1), row(2)])
    with (folder / "metrics.jsonl").open("a") as out:
        out.write('{"step": 3, "lo')
    assert [r["step"] for r in open_run(folder).rows] == [1, 2]
    with (folder / "metrics.jsonl").open("a") as out:
        out.write("\n" + json.dumps(row(4)) + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:3: not a row of JSON"):
        open_run(folder)


def test_each_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*argv: object) -> str:
        code, out, err = command(monkeypatch, capsys, *argv)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix("error: ").replace(str(tmp_path), "DIR").strip()

    assert error().startswith("which run? Give its folder")
    assert error(tmp_path / "no").startswith("DIR/no: no such folder; give the folder of a run")
    assert error(tmp_path).startswith("DIR has no run.json, so it is not the folder of a run")
    (tmp_path / "run.json").write_text("{")
    assert error(tmp_path).startswith("DIR/run.json cannot be read (")
    (tmp_path / "run.json").write_text("3")
    assert error(tmp_path) == "DIR/run.json holds no description of a run"
    make_run(tmp_path, [row(1), row(2)])
    assert error(tmp_path, "--uot=x") == "unknown flag --uot; did you mean --out?"
    assert error(tmp_path, "--zzz") == "unknown flag --zzz; --help lists them all"
    assert error(tmp_path, "again") == "unexpected argument 'again'; one folder at a time"
    assert error(tmp_path, "--out") == "--out: expected one argument"
    missing = error(tmp_path, "--out", tmp_path / "no" / "page.html")
    assert missing == "--out DIR/no/page.html: cannot be written (No such file or directory); choose another file"
    assert error(tmp_path, "--out", tmp_path).startswith("--out DIR: cannot be written (")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.jsonl", "metrics.jsonl", "run.json"]


def test_a_page_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nash_mhc.report.page import write_page

    run = open_run(make_run(tmp_path, [row(1), row(2)]))
    out = tmp_path / "report.html"
    write_page(run, out)
    before = out.read_text()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as half:
            half.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_page(run, out)
    assert out.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.jsonl", "metrics.jsonl", "report.html", "run.json"]


def test_the_page_shows_where_the_time_went(tmp_path: Path) -> None:
    assert "Where the time went" not in page(open_run(make_run(tmp_path / "old", [row(1)])))
    spent = {"time/start": 10.0, "time/step": 80.0, "time/lost": 10.0, "time/down": 0.0, "time/<b>": 0.0001, "goodput": 0.8}
    run = open_run(make_run(tmp_path / "new", [row(1), row(2, **spent)]))
    text = page(run)
    assert "Where the time went: 1 min 40 s" in text
    assert 'class="step" style="width:80.00%"' in text
    assert "lost 10 s, 10.0%" in text
    assert 'class="down"' not in text  # of nothing there is nothing to see
    assert "<b>" not in text
    assert facts(run)["goodput (share of time in steps)"] == "80.0%"
