"""A run on a terminal: a panel at the bottom that keeps changing, and above it whatever there is to say."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nash_mhc.config.humanize import duration, short
from nash_mhc.telemetry.terminal import Reporter

_BARS = "▁▂▃▄▅▆▇█"
_MOST = 60  # losses that are drawn: more are thinned out


def sparkline(values: list[float], width: int) -> str:
    """A bar a value; of more than fit, the mean of each stretch. On a log scale where they fall far."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2 or width < 1:
        return ""
    size = math.ceil(len(known) / width)
    means = [sum(part) / len(part) for at in range(0, len(known), size) if (part := known[at : at + size])]
    if min(means) > 0 and max(means) > 3 * min(means):
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0] for mean in means)


class LivePanel(Reporter):
    """Progress and time left, the loss with its curve, speed, memory, the last checkpoint, and what went wrong."""

    def __init__(self, total_steps: int, floor: float | None, *, quiet: bool = False) -> None:
        super().__init__(total_steps, floor, quiet=quiet)
        self._step, self._row, self._losses = 0, dict[str, Any](), list[float]()
        self._held_out, self._wait, self._since = "", "", 0.0
        self._training = False
        self._live = Live(self, console=self._console, refresh_per_second=4, auto_refresh=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        if self._wait:
            yield Spinner("dots", f"{self._wait} {duration(time.monotonic() - self._since)}")
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
        loss = Text(f"loss {row['loss']:.4f}{self._against(row)}", style="bold")
        curve = sparkline(self._losses, max(0, min(_MOST, width - len(loss) - len(self._held_out) - 6)))
        loss.append(f"  {curve}", style="cyan").append(f"  {self._held_out}", style="magenta")
        speed = [f"{row['tokens_per_s']:,.0f} tok/s", f"{row['step_ms']:.0f} ms a step"]
        speed += [f"mfu {row['mfu']:.0%}"] * (row.get("mfu", 0) >= 0.01)
        speed += [f"memory {row['memory_gib']:.1f} GiB"] if "memory_gib" in row else []
        speed += [f"{short(row['tokens_seen'])} tokens", *filter(None, [self._read(row)])]
        rest = [f"grad {row['grad_norm']:.2f}", f"lr {row['lr']:.2e}"]
        rest += [f"saved step {row['last_checkpoint']:,}"] if "last_checkpoint" in row else ["nothing saved yet"]
        rest += [f"goodput {row['goodput']:.0%}"] if "goodput" in row else []
        lines: list[Any] = [progress, loss, Text("  ".join(speed)), Text("  ".join(rest), style="dim")]
        if wrong := self._wrong(row):
            lines.append(Text(wrong, style="yellow"))
        return Group(*lines)

    def _wrong(self, row: dict[str, Any]) -> str:
        counted = (("spikes", "spike"), ("skipped", "skipped update"))
        told = [f"{n:.0f} {what}{'s' * (n > 1)}" for name, what in counted if (n := row.get(name) or 0) > 0]
        told += [f"{self._most_unused:.0f} scales of heads unused"] * (self._most_unused > 0)
        return ", ".join(told)

    def say(self, text: str) -> None:
        self._wait = ""
        if not self._training:
            self._live.stop()
        super().say(text)

    def wait_for(self, text: str) -> None:
        super().wait_for(text)
        self._wait, self._since = text.removesuffix(" ..."), time.monotonic()
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def begin(self, step: int) -> None:
        super().begin(step)
        self._live.stop()
        self._wait, self._step, self._training = "", step, True
        self._live = Live(self, console=self._console, refresh_per_second=4)
        self._live.start()

    def advance(self, step: int) -> None:
        self._step = step
        super().advance(step)

    def _line(self, step: int, row: dict[str, Any]) -> None:
        self._step, self._row = step, row
        self._losses.append(row["loss"])

    def evaluation(
        self, step: int, found: dict[str, float], floor: tuple[float, float] | None, sample: str | None = None
    ) -> None:
        kl = f", kl {found['eval/kl']:.4f}" if "eval/kl" in found else ""
        self._held_out = f"held out {found['eval/loss']:.4f}{kl} at step {step:,}"
        super().evaluation(step, found, floor, sample)

    def end(self) -> None:
        self._live.stop()
