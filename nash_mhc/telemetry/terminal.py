"""Progress of a run: plain lines, JSON for machines, or a live panel on a terminal."""

from __future__ import annotations

import datetime
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nash_mhc.config.humanize import duration, short
from nash_mhc.config.kits import FIGURES
from nash_mhc.telemetry.sinks import without_nan

_SAMPLE_CHARS = 160  # printed of a sample
log = logging.getLogger(__name__)


def is_terminal() -> bool:
    return _console().is_terminal


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, emoji=False)  # a step range such as 1:100: is no emoji


class Reporter(logging.Handler):
    """Log a run's progress, one line per log interval. As a handler, print the messages of the run."""

    def __init__(self, total_steps: int, floor: float | None) -> None:
        super().__init__()
        self.total, self.floor = total_steps, floor
        self._most_unused = 0.0  # maximum over all rows so far: each level is reported once
        self._start_time, self._start_step = time.monotonic(), 0  # when and where this process started to train
        self._console = _console()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self.format(record), markup=False, soft_wrap=True)
        except BrokenPipeError:
            raise
        except OSError:
            self._console = _console()  # drop the output that a full disk rejected

    def wait_for(self, text: str) -> None:
        """Announce a slow operation; the next message ends it."""
        log.info(text)

    def begin(self, step: int) -> None:
        self._start_time, self._start_step = time.monotonic(), step

    def advance(self, step: int) -> None:
        """Called after each step."""

    def row(self, step: int, row: dict[str, Any]) -> None:
        self._line(step, row)
        unused = row.get("health/scales_unused", [])
        if sum(unused) > self._most_unused:
            self._most_unused = sum(unused)
            layers = ", ".join(str(layer) for layer, count in enumerate(unused) if count)
            log.warning(
                f"step {step}: {self._most_unused:.0f} head scales had zero weight since the last row, in layers {layers} "
                "(health/scales_unused)"
            )

    def _line(self, step: int, row: dict[str, Any]) -> None:
        mfu = f"  mfu {row['mfu']:.0%}" if row.get("mfu", 0) >= 0.01 else ""
        data = f"  {epochs}" if (epochs := self._epochs(row)) else ""
        text = (
            f"step {step:>{len(str(self.total))}}/{self.total}  loss {row['loss']:.4f}{self._relative_loss(row)}  "
            f"lr {row['lr']:.2e}  grad {row['grad_norm']:.2f}  {row['step_ms']:.0f} ms  {row['tokens_per_s']:,.0f} tok/s{mfu}  "
            f"{short(row['tokens_seen'])} tokens{data}  {self._clock(step)}"
        )
        _log_event("metrics", text, {"step": step, **row})

    def _relative_loss(self, row: dict[str, Any]) -> str:
        """Return the loss relative to its floor, then the objective's figures."""
        floor = f" ({row['loss'] / self.floor:.2f}x the floor)" if self.floor else ""
        return floor + "".join(f"  {text}" for text in short_figures(row))

    def _epochs(self, row: dict[str, Any]) -> str:
        """Return the passes over each dataset, in percent."""
        shares = [f"{share:.0%}" for name, share in row.items() if name.startswith("epochs/")]
        return f"data {', '.join(shares[:3])}{', ...' * (len(shares) > 3)}" if shares else ""

    def _clock(self, step: int) -> str:
        elapsed = time.monotonic() - self._start_time
        left = elapsed / max(step - self._start_step, 1) * (self.total - step)
        return duration(elapsed) + (f", {duration(left)} left" if left else "")

    def evaluation(
        self, step: int, values: dict[str, float], floor: tuple[float, float] | None, sample: str | None = None
    ) -> None:
        floors = {} if floor is None else {"floor_nats_per_token": floor[0], "floor_bits_per_byte": floor[1]}
        samples = {} if sample is None else {"sample": sample}
        _log_event("evaluation", _evaluation_line(step, values, floor), {"step": step, **values, **floors, **samples})
        self._show_sample(step, sample)

    def _show_sample(self, step: int, sample: str | None) -> None:
        if sample is not None and step < self.total:  # the last sample is printed in full after the run
            log.info(f"sample: {' '.join(sample.split())[:_SAMPLE_CHARS] or '(empty)'}")

    def end(self) -> None:
        """Stop drawing. May be called more than once."""


class JsonReporter(Reporter):
    """Print one JSON object per line (`--log-format json`), with the event's name and time."""

    def emit(self, record: logging.LogRecord) -> None:
        event, values = getattr(record, "event", ("message", {"text": self.format(record)}))
        print_event(event, values)

    def begin(self, step: int) -> None:
        super().begin(step)
        _log_event("training", f"training from step {step}", {"step": step})

    def row(self, step: int, row: dict[str, Any]) -> None:
        self._line(step, row)

    def _show_sample(self, step: int, sample: str | None) -> None:
        """Print nothing: the evaluation's object has the sample."""


def _log_event(event: str, text: str, values: Mapping[str, Any]) -> None:
    log.info(text, extra={"event": (event, values)})


def print_event(event: str, values: Mapping[str, Any]) -> None:
    """Print one line of `--log-format json`."""
    clean = {name: without_nan(value) for name, value in values.items()}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    try:
        print(json.dumps({"event": event, "at": now} | clean), flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        pass  # a full disk must not stop the run


def short_figures(row: Mapping[str, float], prefix: str = "") -> list[str]:
    """Return an objective's figures for a progress line; `prefix` is that of their names in the row."""
    named = [(f"{prefix}{name}", figure.short) for name, figure in FIGURES.items() if figure.short]
    return [form.format(row[name]) for name, form in named if name in row]


def _evaluation_line(step: int, evaluation: dict[str, float], floor: tuple[float, float] | None) -> str:
    loss = evaluation["eval/loss"]
    text = f"held-out loss at step {step}: {loss:.4f}"
    figures = [figure for name, figure in FIGURES.items() if f"eval/{name}" in evaluation]
    if "eval/bits_per_byte" in evaluation and all(figure.of_text for figure in figures):
        text += f" nats/token, {evaluation['eval/bits_per_byte']:.4f} bits/byte"
        perplexity = evaluation["eval/perplexity"]
        text += f", perplexity {perplexity:{'.2f' if perplexity < 1e6 else '.3g'}}"
    if "eval/accuracy" in evaluation:
        text += f", accuracy {evaluation['eval/accuracy']:.1%}"
    text += "".join(figure.line.format_map(evaluation) for figure in figures)
    if floor is not None:
        text += f"; floor {floor[0]:.4f} nats/token, {floor[1]:.4f} bits/byte ({loss / floor[0]:.2f}x)"
    return text


_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 60


def sparkline(values: list[float], width: int) -> str:
    """Draw at most `width` bars, of means over equal stretches, on a log scale if the values span more than 3x."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 or width < 1:
        return ""
    size = math.ceil(len(finite) / width)
    means = [sum(part) / len(part) for at in range(0, len(finite), size) if (part := finite[at : at + size])]
    if min(means) > 0 and max(means) > 3 * min(means):
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0] for mean in means)


class LivePanel(Reporter):
    """Draw a live panel below the messages: progress, loss curve, speed, memory, checkpoint, warnings."""

    def __init__(self, total_steps: int, floor: float | None) -> None:
        super().__init__(total_steps, floor)
        self._step, self._row, self._losses = 0, dict[str, Any](), list[float]()
        self._held_out, self._waiting_for, self._since = "", "", 0.0
        self._training = False
        self._live = Live(self, console=self._console, refresh_per_second=4)

    def _restart(self, *, transient: bool) -> None:
        """Leave the last drawing on the screen and start below it; `transient` drawings disappear at their end."""
        self._live.stop()
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=transient)
        self._live.start()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        if self._waiting_for:
            yield Spinner("dots", f"{self._waiting_for} {duration(time.monotonic() - self._since)}")
        elif self._training:
            yield Panel(self._inside(options.max_width - 4), title="training", title_align="left", border_style="dim")

    def _inside(self, width: int) -> Group:
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(ratio=1)
        progress.add_row(
            ProgressBar(total=max(self.total, 1), completed=self._step),
            Text(f"{self._step:,}/{self.total:,}"),
            Text(self._clock(self._step), style="dim"),
        )
        if not self._row:
            return Group(progress)
        row = self._row
        loss = Text(f"loss {row['loss']:.4f}{self._relative_loss(row)}", style="bold")
        curve = sparkline(self._losses, max(0, min(_MAX_BARS, width - len(loss) - len(self._held_out) - 6)))
        loss.append(f"  {curve}", style="cyan").append(f"  {self._held_out}", style="magenta")
        speed = [f"{row['tokens_per_s']:,.0f} tok/s", f"{row['step_ms']:.0f} ms/step"]
        speed += [f"mfu {row['mfu']:.0%}"] * (row.get("mfu", 0) >= 0.01)
        speed += [f"memory {row['memory_gib']:.1f} GiB"] if "memory_gib" in row else []
        speed += [f"{short(row['tokens_seen'])} tokens", *filter(None, [self._epochs(row)])]
        rest = [f"grad {row['grad_norm']:.2f}", f"lr {row['lr']:.2e}"]
        rest += [f"saved step {row['last_checkpoint']:,}"] if "last_checkpoint" in row else ["no checkpoint yet"]
        rest += [f"goodput {row['goodput']:.0%}"] if "goodput" in row else []
        lines: list[Any] = [progress, loss, Text("  ".join(speed)), Text("  ".join(rest), style="dim")]
        if warnings := self._warnings(row):
            lines.append(Text(warnings, style="yellow"))
        return Group(*lines)

    def _warnings(self, row: dict[str, Any]) -> str:
        counted = (("spikes", "spike"), ("skipped", "skipped update"))
        warnings = [f"{n:.0f} {what}{'s' * (n > 1)}" for name, what in counted if (n := row.get(name) or 0) > 0]
        warnings += [f"{self._most_unused:.0f} head scales unused"] * (self._most_unused > 0)
        return ", ".join(warnings)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", ("",))[0] == "metrics":
            return  # the panel has them
        self._waiting_for = ""
        if not self._training:
            self._live.stop()
        super().emit(record)

    def wait_for(self, text: str) -> None:
        super().wait_for(text)
        self._waiting_for, self._since = text.removesuffix(" ..."), time.monotonic()
        self._restart(transient=True)

    def begin(self, step: int) -> None:
        super().begin(step)
        self._live.stop()
        self._waiting_for, self._step, self._training = "", step, True
        self._restart(transient=False)

    def advance(self, step: int) -> None:
        self._step = step
        super().advance(step)

    def _line(self, step: int, row: dict[str, Any]) -> None:
        self._step, self._row = step, row
        self._losses.append(row["loss"])
        super()._line(step, row)

    def evaluation(
        self, step: int, values: dict[str, float], floor: tuple[float, float] | None, sample: str | None = None
    ) -> None:
        texts = [f"held-out {values['eval/loss']:.4f}", *short_figures(values, "eval/")]
        self._held_out = f"{', '.join(texts)} at step {step:,}"
        super().evaluation(step, values, floor, sample)

    def end(self) -> None:
        self._live.stop()
