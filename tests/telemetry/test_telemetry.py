"""Metrics files, TensorBoard events and terminal output."""

import io
import json
import logging
import math
import re
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from nash_mhc.config import logs
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.telemetry.terminal import LivePanel, Reporter, is_terminal, sparkline

log = logging.getLogger("nash_mhc.test")
ROW = {"loss": 1.25, "lr": 1e-3, "grad_norm": 0.5, "step_ms": 12.0, "tokens_per_s": 34567.0, "mfu": 0.42}
ROW |= {"tokens_seen": 1_234_567}


def rows_of(path: Path) -> list[dict[str, float | None]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Every scalar of every event file, by tag and step."""
    found = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                # The loader upgrades simple values to tensors, as TensorBoard itself does.
                is_tensor = value.HasField("tensor")
                number = tensor_util.make_ndarray(value.tensor).item() if is_tensor else value.simple_value
                found[value.tag, event.step] = number
    return found


def test_rows_are_lines_of_json_by_step(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path)
    telemetry.write(10, {"loss": 2.5, "lr": 0.1})
    # Readable while the run goes on.
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 2.5, "lr": 0.1}]
    telemetry.write(20, {"loss": 2.0, "lr": 0.05})
    telemetry.write(20, {"eval/loss": 2.1}, file="eval.jsonl")
    telemetry.close()
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [10, 20]
    assert rows_of(tmp_path / "eval.jsonl") == [{"step": 20, "eval/loss": 2.1}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_null_in_json(tmp_path: Path, value: float) -> None:
    telemetry = Telemetry(tmp_path)
    telemetry.write(1, {"loss": value, "lr": 0.5})
    telemetry.close()
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "lr": 0.5}]


def test_lists_become_one_tensorboard_tag_per_entry(tmp_path: Path) -> None:
    """What is measured layer by layer; a NaN of one layer is null there and hides no other."""
    telemetry = Telemetry(tmp_path)
    telemetry.write(3, {"loss": 1.0, "health/gain": [1.0, math.nan], "health/weight": [[0.5, 0.25], [1.0, 2.0]]})
    telemetry.close()
    [written] = rows_of(tmp_path / "metrics.jsonl")
    assert written == {"step": 3, "loss": 1.0, "health/gain": [1.0, None], "health/weight": [[0.5, 0.25], [1.0, 2.0]]}
    seen = {tag: value for (tag, step), value in scalars(tmp_path).items() if step == 3}
    expected = {"loss": 1.0, "health/gain/00": 1.0, "health/gain/01": math.nan}
    expected |= {
        "health/weight/00/00": 0.5,
        "health/weight/00/01": 0.25,
        "health/weight/01/00": 1.0,
        "health/weight/01/01": 2.0,
    }
    assert seen == pytest.approx(expected, nan_ok=True)


def test_a_resumed_run_drops_the_rows_it_will_write_again(tmp_path: Path) -> None:
    first = Telemetry(tmp_path)
    for step in (10, 20, 30, 40):
        first.write(step, {"loss": float(step)})
        first.write(step, {"eval/loss": float(step)}, file="eval.jsonl")
    first.close()
    second = Telemetry(tmp_path, start_step=20)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert [row["step"] for row in rows_of(tmp_path / name)] == [10, 20]
    second.write(30, {"loss": -1.0})
    second.close()
    assert rows_of(tmp_path / "metrics.jsonl") == [
        {"step": 10, "loss": 10.0},
        {"step": 20, "loss": 20.0},
        {"step": 30, "loss": -1.0},
    ]


def test_a_fresh_start_empties_the_files(tmp_path: Path) -> None:
    first = Telemetry(tmp_path)
    first.write(10, {"loss": 1.0})
    first.close()
    Telemetry(tmp_path, start_step=0).close()
    assert rows_of(tmp_path / "metrics.jsonl") == []


def test_a_partial_last_row_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n{"step": 20, "lo')
    Telemetry(tmp_path, start_step=20).close()
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 1.0}]


def test_tensorboard_reads_the_same_scalars(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path)
    written = {10: {"loss": 2.5, "loss/ce": 2.25}, 20: {"loss": math.nan, "loss/ce": 1e-9}}
    for step, row in written.items():
        telemetry.write(step, row)
    telemetry.write(20, {"eval/loss": 0.125}, file="eval.jsonl")
    telemetry.close()
    expected = {(tag, step): value for step, row in written.items() for tag, value in row.items()}
    expected["eval/loss", 20] = 0.125
    assert scalars(tmp_path) == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_tensorboard_reads_texts_and_pictures(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, texts={"configuration": "    seed: 1\n"})
    mixing = [[[[0.75, 0.25], [0.25, 0.75]], [[1.0, 0.0], [0.0, 1.0]]]] * 3  # three layers of two streams
    inside = {"health/res": mixing, "health/scale_weight": [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]}
    telemetry.write(20, {"eval/loss": 0.5, "sample": "*Once*\n<b>"} | inside, file="eval.jsonl")
    telemetry.write(20, {"loss": 1.0, "spike_steps": [13, 17]})
    telemetry.close()
    [written] = rows_of(tmp_path / "eval.jsonl")
    assert written == {"step": 20, "eval/loss": 0.5, "sample": "*Once*\n<b>"} | inside
    board = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    board.Reload()
    assert set(board.Tags()["scalars"]) == {"eval/loss", "loss"}
    texts = {tag: board.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in board.PluginTagToContent("text")}
    assert texts == {"configuration": "    seed: 1\n", "sample": "    *Once*\n    <b>\n"}
    found = {tag: board.Images(tag)[0] for tag in board.Tags()["images"]}
    sizes = {tag: (image.width, image.height) for tag, image in found.items()}
    # Three matrices of two columns with two gaps, two of them below each other with one; three layers of two scales.
    assert sizes == {"inside/H_res_by_layer": (14 * 8, 14 * 5), "inside/scale_weight_by_layer": (14 * 2, 14 * 3)}
    decoded = {tag: Image.open(io.BytesIO(image.encoded_image_string)) for tag, image in found.items()}
    assert {tag: image.size for tag, image in decoded.items()} == sizes
    weights = decoded["inside/scale_weight_by_layer"].convert("L")
    at = lambda scale, layer: weights.getpixel((14 * scale + 7, 14 * layer + 7))
    assert at(0, 1) == at(1, 2) < at(0, 0) == at(1, 0) < at(1, 1) == at(0, 2)  # more is darker


def test_off_a_terminal_a_row_is_one_plain_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", iter([0.0, 100.0, 175.0]).__next__)
    reporter = Reporter(200, floor=0.5)
    with logs.showing(reporter, "info"):
        reporter.begin(10)
        reporter.advance(19)
        reporter.row(20, ROW | {"epochs/a": 2.5, "epochs/b": 0.125})  # ten steps in 75 s
        monkeypatch.undo()
        log.info("saved [the] rest, steps 1:100: " + "x" * 200)
        reporter.end()
    out, err = capsys.readouterr()
    assert out == (
        "step  20/200  loss 1.2500 (2.50x the floor)  lr 1.00e-03  grad 0.50  12 ms  34,567 tok/s  mfu 42%  1.23M tokens  "
        "data 250%, 12%  1 min 15 s, 22 min 30 s left\n"
        "saved [the] rest, steps 1:100: " + "x" * 200 + "\n"
    )
    assert err == ""


def test_unknown_floor_and_peak_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(20, floor=None)
    with logs.showing(reporter, "info"):
        reporter.row(20, ROW | {"mfu": 0.001})
    line = "step 20/20  loss 1.2500  lr 1.00e-03  grad 0.50  12 ms  34,567 tok/s  1.23M tokens  "
    assert re.fullmatch(re.escape(line) + r"\S+ s\n", capsys.readouterr().out)


def test_a_full_disk_does_not_stop_the_reporter(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("w") as full:  # raised when it is closed
        monkeypatch.setattr(sys, "stdout", full)
        reporter = Reporter(20, floor=None)
        with logs.showing(reporter, "info"):
            for _ in range(3):
                reporter.row(20, ROW)
                told += 1
    assert told == 3


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(20, floor=0.5)
    with logs.showing(None, "info"):
        reporter.begin(0)
        reporter.advance(1)
        reporter.row(20, ROW)
        reporter.end()
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_the_screen(text: str, width: int = 120) -> list[str]:
    """What a terminal shows after these characters: lines, with those that were overwritten gone."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b"):
            if part.endswith("A"):
                row -= int(part[2:-1] or 1)
            elif part.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 120) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return terminal


def test_the_panel_is_drawn_below_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    assert is_terminal()
    panel = LivePanel(20, floor=0.5)
    with logs.showing(panel, "info"):
        panel.wait_for("compiling the step ...")
        log.info("compiled in 2.0 s")
        panel.begin(5)
        for step, loss in ((6, 4.0), (7, 2.0), (8, 1.25)):
            panel.advance(step)
            panel.row(
                step, ROW | {"loss": loss, "memory_gib": 1.5, "last_checkpoint": 5, "goodput": 0.5, "spikes": 2, "skipped": 1}
            )
        panel.evaluation(8, {"eval/loss": 1.5}, None, "Once\nupon")
        log.info("something happened")
        panel.end()
        panel.end()
    shown = on_the_screen(terminal.getvalue())
    text = "\n".join(shown)
    words = [line for line in shown if line and line[0] not in "╭│╰"]
    assert words[:2] == ["compiling the step ...", "compiled in 2.0 s"]
    assert words[2:] == ["held-out loss at step 8: 1.5000", "sample: Once upon", "something happened"]
    assert text.count("╭") == text.count("╰") == 1  # of all that was drawn, one panel is left
    assert "8/20" in text
    assert "loss 1.2500 (2.50x the floor)  █▄▁  held-out 1.5000 at step 8" in text
    assert "34,567 tok/s  12 ms/step  mfu 42%  memory 1.5 GiB  1.23M tokens" in text
    assert "grad 0.50  lr 1.00e-03  saved step 5  goodput 50%" in text
    assert "2 spikes, 1 skipped update" in text


def test_a_narrow_terminal_and_nan_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch, columns=40)
    panel = LivePanel(20, floor=None)
    panel.begin(0)
    for step in (1, 2, 3):
        panel.row(step, ROW | {"loss": math.nan})
    panel.end()
    assert all(len(line) <= 40 for line in on_the_screen(terminal.getvalue()))
    assert sparkline([math.nan, 1.0], 10) == ""
    assert sparkline([1.0, 1.0, math.inf], 10) == "▁▁"
    assert sparkline([8.0, 4.0, 2.0, 1.0], 2) == "█▁"
    assert len(sparkline([float(i) for i in range(1000)], 60)) <= 60
