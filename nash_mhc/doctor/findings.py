"""What a check comes to: a line that is fine, or one that says what is wrong and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "not tried"
_LONGEST = 300  # characters of somebody else's message: some bring their stack along


@dataclass(frozen=True)
class Finding:
    check: str
    status: str  # one of the four above; a problem is what would stop a training run
    text: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # what a machine would read out of the text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def told(error: BaseException | str) -> str:
    """An error as one line of bearable length, its end included: that is where reasons stand."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError | TypeError | AttributeError | IndexError):  # whose texts say little by themselves
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def size(count: float) -> str:
    """`812 MB`, `23.4 GB`"""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
