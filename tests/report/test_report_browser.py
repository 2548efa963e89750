"""The page in a real browser: two real runs side by side, and one that is under way."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import runs
import small
from report_files import make_run, row, serving
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nash_mhc.config.schema import TelemetryConfig
from nash_mhc.report.contents import open_run
from nash_mhc.report.page import write_page
from nash_mhc.telemetry.sinks import scalars
from nash_mhc.train import run
from nash_mhc.train.callbacks import EachStep

CFG = small.nash_config(train__total_steps=8, train__eval_interval=4, train__log_interval=1)
CFG = dataclasses.replace(CFG, telemetry=TelemetryConfig(sample_tokens=8))
EVERY_CHART = (
    "loss", "gradient norm", "token accuracy", "learning rate", "tokens/s", "ms/step", "ms/step waiting for data",
    "goodput",
)  # fmt: skip


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        runs.at(folder, CFG, seed=seed)
    return folders


def nothing_is_wrong(tab: browser.Tab, address: str) -> None:
    assert tab.complaints == []
    assert {url for url in tab.requests if not url.startswith(("data:", "blob:"))} <= {address, f"{address}data.json"}


def drawn(tab: browser.Tab) -> dict[str, int]:
    """Points of the lines of each chart, by its name."""
    count = "p => p.getAttribute('d').split(',').length - 1"
    counted = f"[...f.querySelectorAll('path.line')].map({count}).reduce((a, b) => a + b, 0)"
    return dict(tab.run(f"[...document.querySelectorAll('figure')].map(f => [f.dataset.chart, {counted}])"))


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_two_real_runs(tab: browser.Tab, two: list[Path], tmp_path: Path, width: int, dark: bool) -> None:
    write_page([open_run(folder) for folder in two], tmp_path / "page.html")
    address = f"file://{tmp_path}/page.html"
    tab.see(width, dark=dark)
    tab.open(address)
    found = drawn(tab)
    assert set(EVERY_CHART) <= set(found)
    assert all(found[name] >= 2 * 8 for name in EVERY_CHART), found
    assert found["loss"] == 2 * (8 + 2)
    # Nothing sticks out: the page is as wide as the window.
    assert tab.run("document.documentElement.scrollWidth") <= width
    colors = tab.run("getComputedStyle(document.body).backgroundColor"), tab.run("getComputedStyle(document.body).color")
    brightness = [sum(map(int, color[4:-1].split(",")[:3])) for color in colors]
    assert (brightness[0] < brightness[1]) == dark
    # Heat maps: both runs' scales, entropy and streams, and all mixing matrices; none of one colour only.
    painted = "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return new Set(d).size > 2; }"
    maps = tab.run(f"[...document.querySelectorAll('canvas.heat')].map({painted})")
    matrices = CFG.model.mixings * CFG.model.layers
    assert len(maps) == 2 * (2 + 1 + 1 + matrices)
    assert sum(maps) >= 2 * (2 + matrices)
    samples = tab.run("[...document.querySelectorAll('blockquote')].map(q => q.textContent)")
    assert samples == [json.loads((f / "eval.jsonl").read_text().splitlines()[-1])["sample"] or "(nothing)" for f in two]
    differing = tab.run("[...document.querySelectorAll('details tr.differs td:first-child')].map(c => c.textContent)")
    assert differing == ["train.seed", "train.checkpoint_dir"]
    nothing_is_wrong(tab, address)
    tab.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_tensorboards_own_reader_finds_all_of_a_real_run(two: list[Path]) -> None:
    board = EventAccumulator(str(two[0]), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    board.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for name in ("metrics.jsonl", "eval.jsonl"):
        for line in runs.rows(two[0], name):
            for tag, value in scalars(line, name):
                if tag != "step":
                    expected.setdefault(tag, []).append((line["step"], value))
    found = {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert set(found) == set(expected)
    for tag, points in expected.items():
        assert found[tag] == [(step, pytest.approx(value, rel=1e-6, nan_ok=True)) for step, value in points], tag
    pictures = {tag: [event.step for event in board.Images(tag)] for tag in board.Tags()["images"]}
    assert pictures == {"inside/H_res_by_layer": [4, 8], "inside/scale_weight_by_layer": [4, 8]}
    assert set(board.PluginTagToContent("text")) == {"configuration", "sample"}
    assert [event.step for event in board.Tensors("sample")] == [4, 8]


def test_charts_zoom_together_and_share_a_cursor(tab: browser.Tab, two: list[Path], tmp_path: Path) -> None:
    write_page([open_run(two[0])], tmp_path / "page.html")
    tab.see()
    tab.open(f"file://{tmp_path}/page.html")
    whole = drawn(tab)
    for chart in EVERY_CHART:
        tab.drag(f'[data-chart="{chart}"] svg', 0.5, 0.9)
        low, high = tab.run("state.range")
        assert 3 < low < 5 < high < 8
        zoomed = drawn(tab)
        assert all(zoomed[name] < whole[name] for name in EVERY_CHART), zoomed  # not only the one that was dragged over
        said = tab.run("[...document.querySelectorAll('.small output, .big output')].map(o => o.textContent)")
        assert len(said) >= len(EVERY_CHART)
        assert len({text.partition(":")[0] for text in said}) == 1
        tab.run(
            "document.querySelector('[data-chart=\"loss\"] svg').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))"
        )
        assert drawn(tab) == whole
    for axis, last in (("tokens", 8 * 8 * 32), ("FLOPs", None), ("time", None), ("steps", 8)):
        tab.run(f"[...document.querySelectorAll('.choice button')].find(b => b.textContent === '{axis}').click()")
        assert drawn(tab)["loss"] == whole["loss"]
        if last is not None:
            assert tab.run("board.charts[0].x1") <= last
    assert tab.complaints == []


def test_what_a_run_says_is_shown_as_text_and_a_mark_gives_its_command(tab: browser.Tab, tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    evals: list[dict[str, Any]] = [{"step": 4, "eval/loss": 2.0, "sample": f"</script>{bad}"}]
    rows = [row(s, **{f"epochs/{bad}": 0.5, "time/step": 1.0, f"time/{bad}": 1.0}) for s in (1, 2, 3, 4)]
    rows[2]["spike_steps"] = [3]
    folder = make_run(tmp_path / "<b>r", rows, evals, versions={bad: bad})
    write_page([open_run(folder)], tmp_path / "page.html")
    tab.see()
    tab.open(f"file://{tmp_path}/page.html")
    assert tab.run("document.querySelectorAll('img, b, main script').length") == 0
    assert tab.run("document.querySelector('blockquote').textContent") == f"</script>{bad}"
    assert tab.run("document.querySelector('h1').textContent") == "Run <b>r"
    tab.run("document.querySelector('.mark').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert tab.run("document.querySelector('.command code').textContent").endswith("--step 3")
    nothing_is_wrong(tab, f"file://{tmp_path}/page.html")


def test_the_live_page_of_a_run_under_way(tab: browser.Tab, tmp_path: Path) -> None:
    cfg = dataclasses.replace(CFG, train=dataclasses.replace(CFG.train, checkpoint_dir=str(tmp_path)))
    seen: list[Any] = []
    with serving([tmp_path]) as server:

        def look(step: int) -> None:
            """While the run is held at this step: what the page shows by then."""
            if step == 3:
                tab.see()
                tab.open(server.address)
            if step in (3, 6):
                rows = len((tmp_path / "metrics.jsonl").read_text().splitlines())
                tab.wait_for(f"document.querySelector('.sub').textContent.includes(' {rows} row')")
                seen.append((rows, drawn(tab)["loss"], tab.run("document.querySelector('.live').textContent")))

        run(cfg, quiet=True, callbacks=[EachStep(look)])
        tab.wait_for("document.querySelector('.words').textContent.startsWith('All 8 steps are done.')")
        nothing_is_wrong(tab, server.address)
    assert seen == [(2, 2, "live"), (5, 5 + 1, "live")]  # rows of finished steps, and the evaluation of step 4
    tab.wait_for("document.querySelector('.live').textContent.startsWith('not live')")
