"""The pictures of the notebooks. Each is drawn into a PNG, which any notebook can show and replace."""

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

_MOST_LAYERS = 6  # of a deep model, so many are shown
_MOST_LABELS = 160  # tokens; of a longer text only every few have their name
_MOST_ROWS = 90  # tokens; the rows of a longer text are numbered
_WIDTH = 11.0


def _drawn(figure: Figure) -> Image:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90)
    return Image(data=out.getvalue())


def _axes(rows: int, columns: int = 1, *, height: float, width: float = _WIDTH, **options: Any) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _some(count: int) -> list[int]:
    """The first, the last, and evenly some between."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _MOST_LAYERS))})


def labels(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """What each token is, in a few characters."""
    text = ["|" if token in (tokenizer.begin, tokenizer.end) else tokenizer.decode(np.array([token])) for token in tokens]
    return [word.replace("\n", "\\n").replace("$", r"\$") for word in text]


def _name_tokens(axis: Any, names: Sequence[str]) -> None:
    every = -(-len(names) // _MOST_LABELS)
    places = list(range(0, len(names), every))
    turned = 90 if max(map(len, names)) > 2 else 0
    axis.set_xticks(places, [names[i] for i in places], fontsize=7, rotation=turned)


def _scale_names(inside: Inside) -> list[str]:
    return ["tokens" if stride == 1 else f"blocks of {stride}" for stride in inside.strides]


def _points(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    known = [row for row in rows if isinstance(row.get(name), int | float)]
    return [row["step"] for row in known], [row[name] for row in known]


def curves(rows: Sequence[Row], evaluations: Sequence[Row] = (), floor: float | None = None) -> Image:
    """The loss of a run so far, with its learning rate, gradients and speed."""
    figure, ((loss, rate), (gradient, speed)) = _axes(2, 2, height=5.0)
    for axis, name in ((loss, "loss"), (rate, "lr"), (gradient, "grad_norm"), (speed, "tokens_per_s")):
        axis.plot(*_points(rows, name), marker="." if len(rows) < 3 else None)
        axis.set_title({"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_s": "tokens a second"}.get(name, name))
        axis.grid(alpha=0.3)
    if evaluations:
        loss.plot(*_points(evaluations, "eval/loss"), "o", label="held out")
    if floor is not None:
        loss.axhline(floor, linestyle="--", color="gray", label="floor of the text")
    if evaluations or floor is not None:
        loss.legend()
    return _drawn(figure)


def health(rows: Sequence[Row]) -> Image:
    """Layer by layer, over the steps of a run: entropy of the scales' weights, and the weight of the finest scale."""
    told = [row for row in rows if "health/scale_entropy" in row]
    if not told:
        raise ConfigError("this run tells nothing of scales: its model has one, or it has no row yet")
    steps = [row["step"] for row in told]
    figure, ((entropy, finest),) = _axes(1, 2, height=3.2)
    layers = _some(len(told[0]["health/scale_entropy"]))
    for layer in layers:
        entropy.plot(steps, [row["health/scale_entropy"][layer] for row in told], label=f"layer {layer}")
        finest.plot(steps, [row["health/scale_weight"][layer][0] for row in told])
    entropy.set_title("entropy of the scales' weights (1: all alike)")
    finest.set_title("weight of the finest scale")
    for axis in (entropy, finest):
        axis.set_ylim(0, 1)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    entropy.legend()
    return _drawn(figure)


def scale_weights(inside: Inside, names: Sequence[str]) -> Image:
    """Token by token, one heat map a layer; averaged over heads."""
    weights_LCT = inside.weights_LCTN.mean(axis=3)
    layers = _some(len(weights_LCT))
    figure, axes = _axes(len(layers), height=0.6 + 1.1 * len(layers), sharex=True)
    for layer, axis in zip(layers, axes[:, 0], strict=True):
        shown = axis.imshow(weights_LCT[layer], aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        axis.set_yticks(range(len(inside.strides)), _scale_names(inside), fontsize=8)
        axis.set_title(f"layer {layer}", fontsize=9, loc="left")
    _name_tokens(axes[-1, 0], names)
    figure.colorbar(shown, ax=axes[:, 0].tolist(), label="weight", fraction=0.02)
    return _drawn(figure)


def average_weights(inside: Inside, names: Sequence[str]) -> Image:
    """Over the text, averaged over layers and heads; and over depth, averaged over tokens and heads."""
    figure, axes = _axes(2, height=5.0)
    text, depth = axes[:, 0]
    for c, name in enumerate(_scale_names(inside)):
        text.plot(inside.weights_LCTN[:, c].mean(axis=(0, 2)), label=name)
        depth.plot(inside.weights_LCTN[:, c].mean(axis=(1, 2)), marker="o")
    _name_tokens(text, names)
    text.set_title("over the text", fontsize=9, loc="left")
    depth.set_title("over depth", fontsize=9, loc="left")
    depth.set_xticks(range(len(inside.weights_LCTN)))
    depth.set_xlabel("layer")
    for axis in (text, depth):
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    text.legend()
    return _drawn(figure)


def entropy(inside: Inside, names: Sequence[str]) -> Image:
    """Of the scales' weights: a row a layer, averaged over heads."""
    figure, axes = _axes(1, height=1.2 + 0.3 * len(inside.entropy_LTN))
    shown = axes[0, 0].imshow(
        inside.entropy_LTN.mean(axis=2), aspect="auto", vmin=0, vmax=1, cmap="magma", interpolation="nearest"
    )
    axes[0, 0].set_yticks(range(len(inside.entropy_LTN)))
    axes[0, 0].set_ylabel("layer")
    _name_tokens(axes[0, 0], names)
    figure.colorbar(shown, ax=axes[0, 0], label="entropy", fraction=0.02)
    return _drawn(figure)


def mixing(inside: Inside) -> Image:
    """H_res over depth, averaged over the text: of attention and feed-forward, or of both together, and the product of
    all so far."""
    composite_LTRR = inside.composite_LTRR  # ConfigError where there is none
    assert inside.mixing_LSTRR is not None
    layers = _some(len(composite_LTRR))
    names = ("attention", "feed-forward") if inside.mixing_LSTRR.shape[1] == 2 else ("both",)
    figure, axes = _axes(len(names) + 1, len(layers), height=1.8 * (len(names) + 1), width=1.0 + 1.7 * len(layers))
    for column, layer in enumerate(layers):
        each = (*inside.mixing_LSTRR[layer].mean(axis=1), composite_LTRR[layer].mean(axis=0))
        for axis, matrix_RR, name in zip(axes[:, column], each, (*names, "product"), strict=True):
            shown = axis.imshow(matrix_RR, vmin=0, vmax=1, cmap="viridis")
            axis.set_title(f"{name}, layer {layer}", fontsize=8)
            axis.set_xticks(range(len(matrix_RR)))
            axis.set_yticks(range(len(matrix_RR)))
            for (i, j), value in np.ndenumerate(matrix_RR):
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="white" if value < 0.6 else "black")
    figure.colorbar(shown, ax=axes.ravel().tolist(), label="share of a stream", fraction=0.02)
    return _drawn(figure)


def gain(inside: Inside) -> Image:
    """How much larger the mixing of all layers so far could make a signal, and a gradient: 1 is neither."""
    figure, axes = _axes(1, height=2.6)
    axis = axes[0, 0]
    axis.plot(inside.composite_LTRR.sum(axis=-1).max(axis=(1, 2)), marker="o", label="forward: largest row sum")
    axis.plot(inside.composite_LTRR.sum(axis=-2).max(axis=(1, 2)), marker=".", label="backward: largest column sum")
    axis.set_ylim(0, 2)
    axis.set_xticks(range(len(inside.composite_LTRR)))
    axis.set_xlabel("layer")
    axis.grid(alpha=0.3)
    axis.legend()
    return _drawn(figure)


def gaze(inside: Inside, names: Sequence[str], *, layer: int, head: int) -> Image:
    """Where one head looks: a row a token, and at each scale the tokens or blocks that it sees."""
    each, T = inside.gaze(layer, head), len(names)
    figure, axes = _axes(1, len(each), height=4.8)
    for axis, look, name in zip(axes[0], each, _scale_names(inside), strict=True):
        over_tokens_TT = np.repeat(look.weights_TS, look.stride, axis=1)[:, :T]  # a block has the colour of its weight
        # By the root of a weight: one that is spread over many tokens would not be seen otherwise.
        shown = axis.imshow(
            over_tokens_TT, aspect="auto", norm=PowerNorm(0.5, vmin=0, vmax=1), cmap="viridis", interpolation="nearest"
        )
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("looks at")
        if T <= _MOST_ROWS:
            axis.set_xticks(range(over_tokens_TT.shape[1]), names[: over_tokens_TT.shape[1]], fontsize=5)
            axis.set_yticks(range(T), names, fontsize=5)
    axes[0, 0].set_ylabel("token")
    figure.colorbar(shown, ax=axes[0].tolist(), label="weight within the scale", fraction=0.02)
    return _drawn(figure)
