"""Weights & Biases as a sink of a run's numbers.
The library is an extra, and is imported only where it is asked for."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from nash_mhc.config.schema import ConfigError, TelemetryConfig
from nash_mhc.storage.paths import Folder, is_remote
from nash_mhc.telemetry.sinks import Row, scalars


def check(cfg: TelemetryConfig) -> None:
    """Whether rows could be sent; looked at before anything is made. ConfigError."""
    if cfg.wandb is None:
        return
    try:
        import wandb
    except ImportError:
        raise ConfigError("--wandb needs its library: pip install 'nash_mhc[wandb]', or pip install wandb") from None
    if cfg.wandb_mode == "online":
        try:
            known = wandb.login(prompt=False)
        except Exception as error:  # of many kinds; the user needs the reason
            raise ConfigError(f"--wandb {cfg.wandb}: {_first_line(error)}; --wandb-mode offline needs no account") from None
        if not known:
            raise ConfigError(f"--wandb {cfg.wandb}: nobody is logged in; run wandb login, or use --wandb-mode offline")


def new_id() -> str:
    return secrets.token_hex(4)


class WeightsAndBiases:
    """A run there, with an id that the run's folder keeps: what is resumed goes on in the same one."""

    def __init__(self, cfg: TelemetryConfig, folder: Folder, run_id: str, config: dict[str, Any]) -> None:
        import wandb

        self.name = f"wandb {cfg.wandb}"
        self._rows: list[tuple[int, Row, str]] = []
        mode: Literal["online", "offline"] = "online" if cfg.wandb_mode == "online" else "offline"
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        try:
            self._run = wandb.init(
                project=cfg.wandb, id=run_id, name=folder.name, config=config, mode=mode, resume="allow",
                dir=None if is_remote(folder) else str(folder), settings=settings,
            )  # fmt: skip
        except Exception as error:  # of many kinds, its own and others'
            raise ConfigError(f"--wandb {cfg.wandb}: {_first_line(error)}; --wandb-mode offline needs no network") from None

    def add(self, step: int, row: Row, file: str) -> None:
        self._rows.append((step, row, file))

    def flush(self, *, last: bool = False) -> None:
        try:
            while self._rows:
                step, row, file = self._rows[0]
                texts = {tag: value for tag, value in row.items() if isinstance(value, str)}
                self._run.log(dict(scalars(row, file)) | texts, step=step)
                self._rows.pop(0)
            if last:
                self._run.finish()
        except Exception as error:  # whatever it is, it is no reason to stop a run
            raise OSError(_first_line(error)) from error

    @property
    def waiting(self) -> int:
        return len(self._rows)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
