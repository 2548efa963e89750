"""Write the files of a run without training, and serve its live page."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import RunConfig
from nash_mhc.report.page import LiveServer


def make_run(folder: Path, rows: list[dict[str, Any]], evals: list[dict[str, Any]] = [], **info: Any) -> Path:  # noqa: B006
    """The files of a run, by name."""
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


@contextlib.contextmanager
def serving(folders: list[Path]) -> Iterator[LiveServer]:
    with LiveServer(folders, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
