"""Figures of the notebooks, as PNG images, which any notebook can show and replace."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from IPython.display import Image
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from nash_mhc.checkpoint.run_folder import Row
from nash_mhc.config.schema import ConfigError
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.model.inside import Inside

_MOST_LAYERS = 6  # shown of a deep model
_MOST_LABELS = 160  # token labels per axis; longer texts label every n-th token
_MOST_ROWS = 90  # tokens up to which an attention map has token labels
_WIDTH = 11.0


def _image(figure: Figure) -> Image:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90)
    return Image(data=out.getvalue())


def _axes(rows: int, columns: int = 1, *, height: float, width: float = _WIDTH, **options: Any) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _heat_map(axis: Any, values: np.ndarray, *, power: float = 1.0, cmap: str = "viridis", aspect: str = "auto") -> Any:
    """Draw values between 0 and 1; a `power` below 1 makes small ones visible."""
    return axis.imshow(values, norm=PowerNorm(power, vmin=0, vmax=1), cmap=cmap, aspect=aspect, interpolation="nearest")


def _label_curves(axis: Any, title: str, xlabel: str | None = None, *, top: float = 1.0) -> None:
    """Label an axis of curves between 0 and `top`."""
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel(xlabel)
    axis.set_ylim(0, top)
    axis.grid(alpha=0.3)


def _some(count: int) -> list[int]:
    """Return evenly spaced numbers, the first and the last included."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _MOST_LAYERS))})


def labels(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each token, as axis labels."""
    text = ["|" if token in (tokenizer.begin, tokenizer.end) else tokenizer.decode(np.array([token])) for token in tokens]
    return [word.replace("\n", "\\n").replace("$", r"\$") for word in text]


def _name_tokens(axis: Any, names: Sequence[str]) -> None:
    every = -(-len(names) // _MOST_LABELS)
    turned = 90 if max(map(len, names)) > 2 else 0
    axis.set_xticks(range(0, len(names), every), names[::every], fontsize=7, rotation=turned)


def _scale_names(inside: Inside) -> list[str]:
    return ["tokens" if stride == 1 else f"blocks of {stride}" for stride in inside.strides]


def _points(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    known = [row for row in rows if isinstance(row.get(name), int | float)]
    return [row["step"] for row in known], [row[name] for row in known]


def curves(rows: Sequence[Row], evaluations: Sequence[Row] = (), floor: float | None = None) -> Image:
    """Plot loss, learning rate, gradient norm and speed of a run."""
    figure, axes = _axes(2, 2, height=5.0)
    titles = {"loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_s": "tokens/s"}
    for axis, (name, title) in zip(axes.flat, titles.items(), strict=True):
        axis.plot(*_points(rows, name), marker="." if len(rows) < 3 else None)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    loss = axes[0, 0]
    if evaluations:
        loss.plot(*_points(evaluations, "eval/loss"), "o", label="held out")
    if floor is not None:
        loss.axhline(floor, linestyle="--", color="gray", label="lowest possible")
    if evaluations or floor is not None:
        loss.legend()
    return _image(figure)


def health(rows: Sequence[Row]) -> Image:
    """Plot the entropy of the scale weights and the weight of the finest scale per layer over the steps of a run."""
    measured = [row for row in rows if "health/scale_entropy" in row]
    if not measured:
        raise ConfigError("this run has no health/scale_entropy: its model has one scale, or it has no metrics yet")
    steps = [row["step"] for row in measured]
    figure, ((entropy, finest),) = _axes(1, 2, height=3.2)
    for layer in _some(len(measured[0]["health/scale_entropy"])):
        entropy.plot(steps, [row["health/scale_entropy"][layer] for row in measured], label=f"layer {layer}")
        finest.plot(steps, [row["health/scale_weight"][layer][0] for row in measured])
    _label_curves(entropy, "entropy of the scale weights (1: uniform)", "step")
    _label_curves(finest, "weight of the finest scale", "step")
    entropy.legend()
    return _image(figure)


def scale_weights(inside: Inside, names: Sequence[str]) -> Image:
    """Draw the scale weights per token, one heat map per layer, averaged over heads."""
    weights_LCT = inside.weights_LCTN.mean(axis=3)
    layers = _some(len(weights_LCT))
    figure, axes = _axes(len(layers), height=0.6 + 1.1 * len(layers), sharex=True)
    for layer, axis in zip(layers, axes[:, 0], strict=True):
        shown = _heat_map(axis, weights_LCT[layer])
        axis.set_yticks(range(len(inside.strides)), _scale_names(inside), fontsize=8)
        axis.set_title(f"layer {layer}", fontsize=9, loc="left")
    _name_tokens(axes[-1, 0], names)
    figure.colorbar(shown, ax=axes[:, 0].tolist(), label="weight", fraction=0.02)
    return _image(figure)


def average_weights(inside: Inside, names: Sequence[str]) -> Image:
    """Plot the scale weights over the text (mean over layers and heads) and over depth (mean over tokens and heads)."""
    figure, axes = _axes(2, height=5.0)
    text, depth = axes[:, 0]
    for c, name in enumerate(_scale_names(inside)):
        text.plot(inside.weights_LCTN[:, c].mean(axis=(0, 2)), label=name)
        depth.plot(inside.weights_LCTN[:, c].mean(axis=(1, 2)), marker="o")
    _label_curves(text, "over the text")
    _label_curves(depth, "over depth", "layer")
    _name_tokens(text, names)
    depth.set_xticks(range(len(inside.weights_LCTN)))
    text.legend()
    return _image(figure)


def entropy(inside: Inside, names: Sequence[str]) -> Image:
    """Draw the entropy of the scale weights per layer and token, averaged over heads."""
    figure, ((axis,),) = _axes(1, height=1.2 + 0.3 * len(inside.entropy_LTN))
    shown = _heat_map(axis, inside.entropy_LTN.mean(axis=2), cmap="magma")
    axis.set_yticks(range(len(inside.entropy_LTN)))
    axis.set_ylabel("layer")
    _name_tokens(axis, names)
    figure.colorbar(shown, ax=axis, label="entropy", fraction=0.02)
    return _image(figure)


def mixing(inside: Inside) -> Image:
    """Draw H_res of attention and MLP (or of both together) per layer, averaged over the text, and their product."""
    composite_LTRR = inside.composite_LTRR  # ConfigError where there is none
    assert inside.mixing_LSTRR is not None
    layers = _some(len(composite_LTRR))
    names = ("attention", "MLP") if inside.mixing_LSTRR.shape[1] == 2 else ("both",)
    figure, axes = _axes(len(names) + 1, len(layers), height=1.8 * (len(names) + 1), width=1.0 + 1.7 * len(layers))
    for column, layer in enumerate(layers):
        each = (*inside.mixing_LSTRR[layer].mean(axis=1), composite_LTRR[layer].mean(axis=0))
        for axis, matrix_RR, name in zip(axes[:, column], each, (*names, "product"), strict=True):
            shown = _heat_map(axis, matrix_RR, aspect="equal")
            axis.set_title(f"{name}, layer {layer}", fontsize=8)
            axis.set_xticks(range(len(matrix_RR)))
            axis.set_yticks(range(len(matrix_RR)))
            for (i, j), value in np.ndenumerate(matrix_RR):
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="white" if value < 0.6 else "black")
    figure.colorbar(shown, ax=axes.ravel().tolist(), label="share of a stream", fraction=0.02)
    return _image(figure)


def gain(inside: Inside) -> Image:
    """Plot the largest possible gain of a signal and of a gradient by the stream mixing of all layers so far."""
    figure, ((axis,),) = _axes(1, height=2.6)
    axis.plot(inside.composite_LTRR.sum(axis=-1).max(axis=(1, 2)), marker="o", label="forward: largest row sum")
    axis.plot(inside.composite_LTRR.sum(axis=-2).max(axis=(1, 2)), marker=".", label="backward: largest column sum")
    _label_curves(axis, "", "layer", top=2)
    axis.set_xticks(range(len(inside.composite_LTRR)))
    axis.legend()
    return _image(figure)


def gaze(inside: Inside, names: Sequence[str], *, layer: int, head: int) -> Image:
    """Draw the attention of one head: a row per token, and per scale the tokens or blocks that it attends to."""
    each, T = inside.gaze(layer, head), len(names)
    figure, axes = _axes(1, len(each), height=4.8)
    for axis, look, name in zip(axes[0], each, _scale_names(inside), strict=True):
        over_tokens_TT = np.repeat(look.weights_TS, look.stride, axis=1)[:, :T]  # a block is as wide as its tokens
        shown = _heat_map(axis, over_tokens_TT, power=0.5)  # weights are small where they are spread over many tokens
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("attends to")
        if T <= _MOST_ROWS:
            axis.set_xticks(range(over_tokens_TT.shape[1]), names[: over_tokens_TT.shape[1]], fontsize=5)
            axis.set_yticks(range(T), names, fontsize=5)
    axes[0, 0].set_ylabel("token")
    figure.colorbar(shown, ax=axes[0].tolist(), label="weight within the scale", fraction=0.02)
    return _image(figure)
