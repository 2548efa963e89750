"""The report page is complete, self-contained and omits what is unknown."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_files import make_run, row, serving

from nash_mhc.config.commands import module_command, one_line_errors
from nash_mhc.config.schema import ConfigError
from nash_mhc.report.__main__ import main
from nash_mhc.report.contents import contents, facts, open_run, summarize
from nash_mhc.report.page import LiveServer, page_data

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
        "final loss, nats/token": "2.0000",
        "held-out loss, nats/token": "2.0000",
        "held-out bits/byte": "2.8850",
        "floor, nats/token": "0.5000",
        "floor, bits/byte": "0.7500",
        "held-out loss / floor": "4.000x",
        "tokens/s (median)": "1,500",
        "MFU (median)": "25.0%",
    }


def shown(text: str) -> dict[str, Any]:
    """Return the data embedded in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    return json.loads(found.group(1))


def test_page_is_whole_and_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a <b> run", [row(s) for s in (1, 2, 3, 4)], [EVAL | {"sample": "</script><b>&"}])
    code, out, err = command(monkeypatch, capsys, folder)
    assert (code, err) == (0, "")
    assert out.endswith(f"report: {folder / 'report.html'}\n")
    assert re.search(r"^held-out loss / floor +4\.000x$", out, re.M)
    assert "\nStep 4 of 300. The held-out loss is 2.0000 nats/token at step 4, 4.00 times the floor of this text.\n" in out
    text = (folder / "report.html").read_text()
    elements = Elements(text)
    assert [script.get("src") for script in elements.of("script")] == [None] * 3
    assert not elements.of("link") + elements.of("img") + elements.of("b")
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|url\((?!#)|@import", text)
    (allowed,) = [meta["content"] for meta in elements.of("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in str(allowed)
    assert "connect-src 'none'" in str(allowed)
    (run,) = shown(text)["runs"]
    assert (run["name"], run["samples"]) == ("a <b> run", [{"step": 4, "text": "</script><b>&"}])
    assert run["config"]["optim.learning_rate"] == "0.0012"
    assert run["config"]["model.window"] == "none"
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
    (run,) = shown((tmp_path / "page.html").read_text())["runs"]
    assert run["count"] == [count, 0]
    assert run["rows"]["step"] == [20] * count


def test_non_numbers_are_gaps(tmp_path: Path) -> None:
    rows = [row(1), row(2, loss=float("nan"), grad_norm="?"), row(3, loss=float("inf"), grad_norm=[1.0]), row(4)]
    found = contents(open_run(make_run(tmp_path, rows)))
    assert found["rows"]["loss"] == [8.0, None, None, 2.0]
    assert found["rows"]["grad_norm"] == [1.5, None, None, 1.5]
    json.dumps(found, allow_nan=False)
    odd = contents(open_run(make_run(tmp_path / "odd", [row(1, grad_norm=[1.0], **{"health/scale_weight": [0.5, [1.0]]})])))
    assert "grad_norm" not in odd["rows"]
    assert odd["health"] == {}


def test_what_is_measured_layer_by_layer(tmp_path: Path) -> None:
    inside = {"health/gain_forward": [1.0, 1.01], "health/scale_weight": [[0.5, 0.5], [0.25, None]], "loss/sparsity": 0.0}
    mixing = [[[[0.9, 0.1], [0.1, 0.9]]] * 2] * 2
    run = open_run(make_run(tmp_path, [row(s, **inside) for s in range(1, 301)], [EVAL | {"health/res": mixing}]))
    found = contents(run)
    health = found["health"]
    assert set(health["values"]) == {"gain_forward", "scale_weight"}
    assert health["step"][-1] == 300
    assert len(health["step"]) == len(health["values"]["scale_weight"]) == 100
    assert health["values"]["scale_weight"][0] == [[0.5, 0.5], [0.25, None]]
    assert found["mixing"] == mixing


def test_a_long_run_keeps_its_spikes_and_stays_small(tmp_path: Path) -> None:
    rows = [row(s, loss=1000.0 if s == 3_333 else 1.0 + s % 7) for s in range(1, 5_001)]
    rows[1_776]["skipped_steps"] = [1_777]
    found = contents(open_run(make_run(tmp_path, rows)))
    assert len(found["rows"]["step"]) < 3_200
    assert found["rows"]["loss"][found["rows"]["step"].index(3_333)] == 1000.0
    assert 1_777 in found["rows"]["step"]
    assert (found["rows"]["step"][0], found["rows"]["step"][-1]) == (1, 5_000)


def test_a_step_that_stands_out_comes_with_the_command_that_shows_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "my run", [row(10, spike_steps=[3, 7]), row(20, skipped_steps=[7, 12]), row(30)])
    found = contents(open_run(folder))["marks"]
    assert [(mark["step"], mark["what"]) for mark in found] == [(3, "spike"), (7, "spike, skipped"), (12, "skipped")]
    assert found[0]["command"] == module_command("nash_mhc.data", "inspect", str(folder), "--step", "3")


def test_evaluations_are_placed_between_rows(tmp_path: Path) -> None:
    """Evaluations record only their step; tokens and time are interpolated between rows."""
    rows = [row(2, **{"time/step": 20.0}), row(4, **{"time/step": 40.0})]
    evals = [{"step": s, "eval/loss": 1.0} for s in (1, 2, 3, 4, 5)]
    found = contents(open_run(make_run(tmp_path, rows, evals)))["evals"]
    assert found["tokens"] == [64.0, 128.0, 192.0, 256.0, None]
    assert found["seconds"] == [10.0, 20.0, 30.0, 40.0, None]


def test_several_runs_are_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name / "r", [row(s) for s in (1, 2)], [EVAL]) for name in "ab"]
    code, out, err = command(monkeypatch, capsys, *runs, "--out", tmp_path / "both.html")
    assert (code, err) == (0, "")
    assert "held-out loss / floor" in out
    found = shown((tmp_path / "both.html").read_text())["runs"]
    assert [run["name"] for run in found] == ["r", "r (2)"]
    assert [run["folder"] for run in found] == [str(run) for run in runs]


def test_a_half_written_last_line_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [row(1), row(2)])
    with (folder / "metrics.jsonl").open("a") as out:
        out.write('{"step": 3, "lo')
    assert [r["step"] for r in open_run(folder).rows] == [1, 2]
    with (folder / "metrics.jsonl").open("a") as out:
        out.write("\n" + json.dumps(row(4)) + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:3: not a JSON object"):
        open_run(folder)


def test_each_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*argv: object) -> str:
        code, out, err = command(monkeypatch, capsys, *argv)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix("error: ").replace(str(tmp_path), "DIR").strip()

    assert "nash_mhc.report runs/" in error()
    assert error(tmp_path / "no").startswith("DIR/no: no such folder; give a run directory")
    assert error(tmp_path).startswith("DIR has no run.json, so it is not a run directory")
    (tmp_path / "run.json").write_text("{")
    assert error(tmp_path).startswith("DIR/run.json: cannot be read (")
    (tmp_path / "run.json").write_text("3")
    assert error(tmp_path).startswith("DIR/run.json: cannot be read (")
    make_run(tmp_path, [row(1), row(2)])
    assert error(tmp_path, "--uot=x") == "unknown flag --uot; did you mean --out?"
    assert error(tmp_path, "--zzz") == "unknown flag --zzz; --help lists them all"
    assert error(tmp_path, tmp_path / "again").startswith("DIR/again: no such folder")
    assert error(tmp_path, "--port", 1).startswith("--port needs --live; ")
    assert error(tmp_path, "--live", "--out", "x").startswith("--live writes no file; leave out --out")
    taken = LiveServer([tmp_path], 0)
    number = taken.server_address[1]
    assert error(tmp_path, "--live", "--port", number).startswith(f"--port {number}: cannot be used (Address already in use)")
    taken.server_close()
    assert error(tmp_path, "--live", "--port", 99999).startswith("--port 99999: cannot be used (")
    assert error(tmp_path, "--out") == "--out: expected one argument"
    missing = error(tmp_path, "--out", tmp_path / "no" / "page.html")
    assert missing == "--out DIR/no/page.html: cannot be written (No such file or directory); choose another file"
    assert error(tmp_path, "--out", tmp_path).startswith("--out DIR: cannot be written (")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.jsonl", "metrics.jsonl", "run.json"]


def test_a_page_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nash_mhc.report.page import write_page

    run = open_run(make_run(tmp_path, [row(1), row(2)]))
    out = tmp_path / "report.html"
    write_page([run], out)
    before = out.read_text()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as half:
            half.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_page([run], out)
    assert out.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.jsonl", "metrics.jsonl", "report.html", "run.json"]


def test_where_the_time_went(tmp_path: Path) -> None:
    assert contents(open_run(make_run(tmp_path / "old", [row(1)])))["spent"] == {}
    spent = {"time/start": 10.0, "time/step": 80.0, "time/lost": 10.0, "time/down": 0.0, "time/<b>": 0.0001, "goodput": 0.8}
    run = open_run(make_run(tmp_path / "new", [row(1), row(2, **spent)]))
    assert contents(run)["spent"] == {"start": 10.0, "step": 80.0, "lost": 10.0}  # parts too small to see are omitted
    assert summarize(run).endswith("It took 1 min 40 s, 80% of it in steps and 10% lost to stops.")
    assert facts(run)["goodput (share of time in steps)"] == "80.0%"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with serving([make_run(tmp_path / "r", [row(1), row(2)])]) as server:
        yield server


def fetch(server: LiveServer, path: str, host: str = "localhost") -> tuple[int, str]:
    request = urllib.request.Request(server.address + path, headers={"Host": f"{host}:{server.server_address[1]}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_a_live_page_follows_the_run(live: LiveServer, tmp_path: Path) -> None:
    code, text = fetch(live, "")
    assert code == 200
    assert "data-live" in text
    assert "connect-src 'self'" in text
    assert shown(text)["runs"][0]["rows"]["step"] == [1, 2]
    with (tmp_path / "r" / "metrics.jsonl").open("a") as out:
        out.write(json.dumps(row(3)) + "\n")
    code, text = fetch(live, "data.json")
    assert code == 200
    assert json.loads(text) == page_data([open_run(tmp_path / "r")])
    assert json.loads(text)["runs"][0]["rows"]["step"] == [1, 2, 3]
    assert not (tmp_path / "r" / "report.html").exists()


def test_a_live_page_is_for_this_machine_and_survives_its_folder(live: LiveServer, tmp_path: Path) -> None:
    assert live.server_address[0] == "127.0.0.1"
    assert fetch(live, "", host="elsewhere.example")[0] == 403
    assert fetch(live, "run.json")[0] == 404
    (tmp_path / "r").rename(tmp_path / "moved")
    code, text = fetch(live, "data.json")
    assert (code, text.count("\n")) == (503, 1)
    assert "no such folder" in text
    (tmp_path / "moved").rename(tmp_path / "r")
    assert fetch(live, "data.json")[0] == 200


def test_the_live_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [row(1), row(2)])
    argv = [sys.executable, "-m", "nash_mhc.report", "--live", str(folder)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"live: (http://localhost:\d+/) \(Ctrl-C to stop\)\n", process.stdout.readline())
            assert found is not None
            with urllib.request.urlopen(found.group(1) + "data.json") as answer:
                assert json.load(answer)["runs"][0]["rows"]["step"] == [1, 2]
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
            assert (process.returncode, out.strip(), err) == (0, "", "")
        finally:
            process.kill()
