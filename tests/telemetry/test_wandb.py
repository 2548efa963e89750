"""Weights & Biases as a sink, with the real library, offline."""

import dataclasses
import json
import struct
import sys
import time

import pytest
from runs import RUN, at, rows

from nash_mhc.config.schema import ConfigError, TelemetryConfig
from nash_mhc.telemetry import sinks
from nash_mhc.telemetry.sinks import Telemetry, scalars

OFFLINE = dataclasses.replace(RUN, telemetry=TelemetryConfig(sample_tokens=4, wandb="stories", wandb_mode="offline"))


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def kept(folder):
    """Bytes of the rows that wait to be sent, run by run, the oldest first."""
    return [path.read_bytes() for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def ids(folder):
    return {path.stem.removeprefix("run-") for path in folder.glob("wandb/offline-run-*/*.wandb")}


def records(data):
    """Those of one of its files: a log of blocks, in which a record may go on in the next one."""
    block, header, whole = 32768, 7, b""
    at = header  # of the file itself
    while at < len(data):
        if block - at % block < header:  # too little is left of the block for another one
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # it is all, or the last part
            yield whole
            whole = b""


def logged(folder):
    """(step, name) -> value of everything that waits to be sent."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for data in kept(folder):
        for content in records(data):
            record = Record()
            record.ParseFromString(content)
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            found |= {(record.history.step.num, name): value for name, value in values.items() if not name.startswith("_")}
    return found


def test_wandb_gets_the_same_numbers_as_the_files(tmp_path):
    sink = sinks.WeightsAndBiases(OFFLINE.telemetry, tmp_path, sinks.new_wandb_id(), {})
    telemetry = Telemetry(tmp_path, others=[sink])
    for step in range(1, 400):  # more than fits into one of its blocks
        layers = [[0.25 * step, 0.75], [0.5, 1.0 / step]]
        telemetry.write(step, {"loss": 1.0 / step, "tokens_seen": step, "health/scale_weight": layers, "spike_steps": [step]})
    telemetry.write(399, {"eval/loss": 0.5, "sample": "Once", "health/res": [[[[1.0]]]]}, file="eval.jsonl")
    telemetry.close()
    expected = {}
    for name in ("metrics.jsonl", "eval.jsonl"):
        for row in rows(tmp_path, name):
            step = row.pop("step")
            expected |= {(step, tag): value for tag, value in scalars(row, name)}
    assert {(399, "health/scale_weight/01/01"), (399, "eval/loss"), (1, "tokens_seen")} <= set(expected)
    expected[399, "sample"] = "Once"
    # Its own process writes the file, and on a busy machine `finish` has come back before the last of it was there.
    hangs_at = time.monotonic() + 60
    while len(logged(tmp_path)) < len(expected) and time.monotonic() < hangs_at:
        time.sleep(0.05)
    assert logged(tmp_path) == expected


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path):
    folder = tmp_path / "run"
    at(folder, OFFLINE, total_steps=4)
    wandb = json.loads((folder / "run.json").read_text())["wandb"]
    assert wandb["project"] == "stories"
    (first,) = kept(folder)
    for row in rows(folder) + rows(folder, "eval.jsonl"):
        assert json.dumps(row.get("loss", row.get("eval/loss"))).encode() in first
    assert b"health/" not in first or b"/00" in first  # one number an entry
    at(folder, total_steps=5)  # once without it
    at(folder, OFFLINE)
    assert json.loads((folder / "run.json").read_text())["wandb"] == wandb
    assert ids(folder) == {wandb["id"]}
    later = [row for row in rows(folder) if row["step"] > 5]
    assert later
    assert all(json.dumps(row["loss"]).encode() in b"".join(kept(folder)) for row in later)


def test_another_project_is_another_wandb_run(tmp_path):
    told = sinks.new_wandb_id(), sinks.new_wandb_id()
    assert told[0] != told[1]
    at(tmp_path / "run", OFFLINE, total_steps=2)
    before = json.loads((tmp_path / "run" / "run.json").read_text())["wandb"]
    other = dataclasses.replace(OFFLINE, telemetry=TelemetryConfig(sample_tokens=0, wandb="other", wandb_mode="offline"))
    at(tmp_path / "run", other, total_steps=4)
    after = json.loads((tmp_path / "run" / "run.json").read_text())["wandb"]
    assert after["project"] == "other"
    assert after["id"] != before["id"]


def test_wandb_needs_an_account_and_the_library(tmp_path, monkeypatch):
    online = dataclasses.replace(RUN, telemetry=TelemetryConfig(sample_tokens=0, wandb="stories"))
    with pytest.raises(ConfigError, match=r"--wandb stories: .*--wandb-mode offline"):
        at(tmp_path / "run", online)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb needs its library: pip install"):
        at(tmp_path / "run", OFFLINE)
    assert not (tmp_path / "run").exists()


class Broken:
    """A sink that can be written from the third row on."""

    name = "somewhere"

    def __init__(self):
        self.rows, self.written = [], []

    def add(self, step, row, file):
        self.rows.append((step, row, file))

    def flush(self, *, last=False):
        if 0 < len(self.rows) < 3:
            raise OSError("the line is dead")
        self.written += self.rows
        self.rows = []

    @property
    def waiting(self):
        return len(self.rows)


def test_a_failing_sink_keeps_its_rows_and_does_not_stop_the_run(tmp_path, messages):
    sink = Broken()
    telemetry = Telemetry(tmp_path, others=[sink])
    for step in (1, 2, 3, 4):
        telemetry.write(step, {"loss": 1.0 / step})
    telemetry.close()
    assert [step for step, *_ in sink.written] == [1, 2, 3]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert [line.split(" (")[0].split(" to ")[0] for line in messages] == [
        "somewhere could not be written",
        "metrics are written",
        "somewhere could not be written",
        "1 row of somewhere could not be written",
    ]
