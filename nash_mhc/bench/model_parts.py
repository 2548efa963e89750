"""The parts of a model's step, each with the arrays that it meets there: what `bench parts` times one by one.

One layer is walked once, from the tokens to the loss. Every part is a call of the model's own function on what the part
before it has made; nothing is written here a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from nash_mhc.config.commands import name_hint
from nash_mhc.config.model import LayerKind
from nash_mhc.config.schema import ConfigError, ModelConfig, RunConfig
from nash_mhc.model.attention import Attention, AttentionLayout, attention_layout
from nash_mhc.model.layer import ffn_class, mixer_class, residual_class
from nash_mhc.model.lm import by_place, kernel_for
from nash_mhc.model.multiscale import Multiscale
from nash_mhc.model.parts import SwiGLU
from nash_mhc.model.protocol import Execution
from nash_mhc.model.residual import StreamState
from nash_mhc.model.weights import Weight
from nash_mhc.objectives.base import Batch
from nash_mhc.objectives.vocabulary import sharded_xent
from nash_mhc.ops.attend_rows import Rows
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.optimizers import updated_average
from nash_mhc.optim.rounding import salt_of, to_float32
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import ADAPTER, GATE, MATRIX, TABLE, Declared, DerivedParam, map_declared, named_leaves
from nash_mhc.parallel.sharding import for_compute

Run = Callable[[Any, Any, Any], Any]  # (module, arrays, aside) -> what comes out


class Part(NamedTuple):
    """What is known of a part before it runs. FLOPs are those of matrix products, on the way there and back."""

    name: str
    times: int  # in a step
    run: Run
    flops: float
    flops_back: float
    in_layer: bool  # in the compute dtype, and under the run's remat
    reads_again: bool  # whether the way back needs what went in
    has_gradient: bool
    unread: int  # bytes of what goes in that nothing looks at
    returned: Callable[[Any], Any]  # of what comes out; an array that only passes through would be copied


class Given(NamedTuple):
    """Arrays of one part: weights as the run keeps them, what gradients flow to, what none flow to, and the result."""

    weights: Any
    frozen: Any
    arrays: Any
    aside: Any
    out: Any


def module_of(part: Part, given: Given, dtype: Any) -> Any:
    module = eqx.combine(given.weights, given.frozen)
    return for_compute(module, dtype) if part.in_layer else module


def check(cfg: RunConfig, devices: int) -> ModelConfig:
    """ConfigError for what cannot be taken apart."""
    if not isinstance(cfg.model, ModelConfig):
        raise ConfigError(f"bench parts knows the parts of {ModelConfig.architecture} alone; bench step times any model")
    if cfg.objective.name not in ("next_token", "smoothed"):
        raise ConfigError(f"bench parts knows the losses next_token and smoothed, not --objective {cfg.objective.name}")
    if devices > 1:
        raise ConfigError(f"bench parts times one device's work, and the mesh has {devices}; leave the mesh out")
    return cfg.model


def chosen(names: list[str], wanted: str | None) -> list[str]:
    """`attention` stands for all that begin so. ConfigError for what there is not."""
    found: set[str] = set()
    for word in [] if wanted is None else wanted.split(","):
        fits = {name for name in names if name == word.strip() or name.startswith(f"{word.strip()}-")}
        if not fits:
            raise ConfigError(f"--parts {word.strip()}: this model has no such part{name_hint(word.strip(), names)}")
        found |= fits
    return [name for name in names if name in found or wanted is None]


def seen_keys(length: int, window: int | None, stride: int) -> int:
    """Keys that all tokens of a document see together: of the tokens, or of the blocks that ended before."""
    if stride > 1:
        return sum(t // stride for t in range(length))
    return sum(min(t + 1, window or length) for t in range(length))


_LAYERS_AT_ONCE = 4  # of an update, whose memory is that of their weights seven times over


class Walk:
    """A model of one group of layers, as `create_state` makes it, walked with one part of a batch."""

    def __init__(self, cfg: RunConfig, documents: int, trained: Any, frozen: Any, batch: Batch) -> None:
        self.cfg, self.model = cfg, check(cfg, 1)
        self.parts: dict[str, Part] = {}
        self.given: dict[str, Given] = {}
        self._documents, self._batch = documents, batch
        self._tokens = math.prod(batch.inputs.shape)
        self._lm = trained, frozen
        groups = [by_place(side.layers, len(self.model.group)) for side in self._lm]
        self._layers = [[jax.tree.map(lambda a: a[0], stack) for stack in stacks] for stacks in groups]
        self._execution = Execution(cfg.train.dtype, cfg.train.kept, cfg.train.attention, documents)
        x_BTD = self._inside(self._embedding())
        self._loss(x_BTD)
        self._updates()

    def _take(
        self, name: str, times: int, run: Run, at: Callable[[Any], Any], weights: tuple[str, ...] = (), *, arrays: Any = (),
        aside: Any = (), flops: float = 0.0, whole: bool = False, in_layer: bool = True, reads_again: bool = True,
        has_gradient: bool = True, accumulates: bool = True, unread: int = 0, rows: int | None = None, layer: int = 0,
        returned: Callable[[Any], Any] = lambda out: out,
    ) -> Any:  # fmt: skip
        """Run a part and record its arrays. `at`: its module, in layer `layer` of a group or in the whole model.

        `weights`: how the names of those begin that it uses; `rows`: how many rows of a table count.
        """
        sides = self._lm if whole else [layers[layer] for layers in self._layers]
        trained, frozen = (_only(at(side), weights) for side in sides)
        used, learned = (_matrix_numbers(each, rows) for each in (eqx.combine(trained, frozen), trained))
        has_gradient = bool(has_gradient and jax.tree.leaves((trained, arrays)))  # of frozen weights, there is none
        part = Part(
            name, times * (self.cfg.train.grad_accum if accumulates else 1), run,
            flops + 2.0 * self._tokens * used, 2 * flops + 2.0 * self._tokens * (used + learned),
            in_layer, reads_again, has_gradient, unread, returned,
        )  # fmt: skip
        given = Given(trained, frozen, arrays, aside, None)
        out = run(module_of(part, given, jnp.dtype(self.cfg.train.dtype)), arrays, aside)
        self.parts[name], self.given[name] = part, given._replace(out=out)
        return out

    def _embedding(self) -> Any:
        tokens_BT, dtype = self._batch.inputs, self.cfg.train.dtype
        table = jax.tree.leaves(_only(eqx.combine(*self._lm), ("embed_VD",)))[0]
        row = self.model.width * table.dtype.itemsize
        return self._take(
            "embedding", 1, lambda lm, _, tokens_BT: lm.embedded(tokens_BT, dtype), lambda lm: lm, ("embed_VD",),
            aside=tokens_BT, whole=True, in_layer=False, reads_again=False, rows=0,  # looked up, not multiplied
            unread=row * max(0, table.shape[0] - self._tokens),
        )  # fmt: skip

    def _inside(self, x_BTD: Any) -> Any:
        """One layer; what the last norm would give."""
        L, residual = self.model.layers, lambda layer: layer.attention_residual
        state = residual_class(self.model).enter(self.model, x_BTD)
        maps: Any = None
        norm: Run = lambda own, x_BTD, _: own(x_BTD)
        if self.model.mixings:
            read: Run = lambda own, xs, squares_BTR: own.attention_residual.read(
                StreamState(xs, squares_BTR), own.attention_norm
            )
            normed_BTD, maps = self._take(
                "mhc-read", self.model.mixings * L, read, lambda layer: layer, ("attention_residual.", "attention_norm."),
                arrays=state.xs, aside=state.squares_BTR,
                returned=lambda out: (out[0], out[1]._replace(xs=())),  # the streams go through as they are
            )  # fmt: skip
            between = L if self.model.mixings == 1 else 0  # attention and feed-forward, as in a plain residual
            self._take(
                "norm", between + 1, norm, lambda lm: lm.norm, ("scale_D",), arrays=x_BTD, whole=True, in_layer=False
            )  # fmt: skip
        else:
            at = lambda layer: layer.attention_norm
            normed_BTD = self._take("norm", 2 * L + 1, norm, at, ("scale_D",), arrays=x_BTD)
        read_BTD, slots_BT = normed_BTD, self._batch.segments
        if self.model.conv_taps:
            conv = lambda layer: layer.attention_conv
            read_BTD = self._take(
                "conv", L, lambda own, x, slots: own(x, slots), conv, ("taps_JD",), arrays=read_BTD, aside=slots_BT
            )
        y_BTD = self._mixers(read_BTD)
        if self.model.mixings:
            # The gradient of the old streams is made where they were read.
            write: Run = lambda own, new, state: own.write(state, new[0], new[1]._replace(xs=state.xs))
            self._take("mhc-write", self.model.mixings * L, write, residual, arrays=(y_BTD, maps._replace(xs=())), aside=state)
        else:
            self._take(
                "add", 2 * L, lambda own, both, _: own.write(*both, None), residual, arrays=(state, y_BTD), reads_again=False
            )
        self._feed_forward(normed_BTD)
        return normed_BTD

    def _places(self, name: Callable[[LayerKind], str]) -> dict[str, list[int]]:
        """Return the layers of a group by the name of a block."""
        places: dict[str, list[int]] = {}
        for i, kind in enumerate(self.model.group):
            places.setdefault(name(kind), []).append(i)
        return places

    def _feed_forward(self, x_BTD: Any) -> None:
        groups, at = self.model.layers // len(self.model.group), lambda layer: layer.ffn
        for name, places in self._places(lambda kind: kind.ffn).items():
            times, layer = groups * len(places), places[0]
            if ffn_class(self.model.group[layer]) is SwiGLU:
                up: Run = lambda own, x, _: own.widened(x)
                h_BTF = self._take("ffn-up", times, up, at, ("gate_DF", "up_DF"), arrays=x_BTD, layer=layer)
                self._take("ffn-down", times, lambda own, h, _: own.narrowed(h), at, ("down_FD",), arrays=h_BTF, layer=layer)
            else:
                self._take(f"ffn-{name}", times, lambda own, x, _: own(x), at, ("",), arrays=x_BTD, layer=layer)

    def _mixers(self, x_BTD: Any) -> Any:
        """Take our own mixers apart; one of another class is a part as it is, for each window."""
        model, segments_BT = self.model, self._batch.segments
        B, T = segments_BT.shape
        kernel = kernel_for(self._execution, T, model.head_dim, model.window)
        layout = attention_layout((B, T), segments_BT, model.strides, kernel, self._documents)
        y_BTD, at = None, lambda layer: layer.attention
        for name, places in self._places(lambda kind: kind.mixer).items():
            if mixer_class(model.group[places[0]]) in (Attention, Multiscale):
                y_BTD = self._attention(x_BTD, layout, kernel, places)
                continue
            for window, times in Counter(model.group[i].window for i in places).items():
                kind, layer = next((model.group[i], i) for i in places if model.group[i].window == window)
                run = _mixing(window, kernel)
                weights = _matrix_numbers(eqx.combine(*(at(layers[layer]) for layers in self._layers)), None)
                flops = mixer_class(kind).flops_per_token(model, window, T // self._documents) / 3 - 2.0 * weights
                y_BTD = self._take(
                    f"mixer-{name}-{window or 'full'}", times * model.layers // len(model.group), run, at, ("",), arrays=x_BTD,
                    aside=layout, flops=self._tokens * flops, layer=layer,
                )  # fmt: skip
        return y_BTD

    def _attention(self, x_BTD: Any, layout: AttentionLayout, kernel: str, places: list[int]) -> Any:
        model, (B, T) = self.model, self._batch.segments.shape
        L = model.layers // len(model.group) * len(places)
        at = places[0]
        several = mixer_class(model.group[places[0]]) is Multiscale
        windows, strides = [model.group[i].window for i in places], model.strides if several else (1,)
        mixer = lambda layer: layer.attention
        base = (lambda layer: layer.attention.base) if several else mixer
        names = ("q_DNH", "k_DKH", "v_DKH", "q_bias", "k_bias", "v_bias")
        qkv = self._take("qkv", L, lambda own, x_BTD, _: own.project(x_BTD), base, names, arrays=x_BTD, layer=at)
        if several:
            views = self._take(
                "scales", L, lambda own, qkv, layout: [rows[:3] for rows in own.rows_of_scales(*qkv, layout)], mixer,
                ("base.q_norm", "base.k_norm", "pool_"), arrays=qkv, aside=layout, layer=at,
                returned=lambda views: [views[0][:2], *views[1:]],  # values go through as they are
            )  # fmt: skip
        else:
            turned = self._take(
                "positions", L, lambda own, qk, positions_BT: own.rotate(*qk, positions_BT), mixer, ("q_norm", "k_norm"),
                arrays=qkv[:2], aside=layout.positions_BT, layer=at,
            )  # fmt: skip
            views = [(*turned, qkv[2])]
        found = []
        for c, (stride, view) in enumerate(zip(strides, views, strict=True)):
            segments, _, documents = layout.at(c, stride)
            for window, times in Counter(windows if stride == 1 else [None] * len(windows)).items():
                name = f"pooled-{stride}" if stride > 1 else "full" if window is None else f"{window}"
                pairs = B * self._documents * seen_keys(T // self._documents, window, stride)
                got = self._take(
                    f"attention-{name}", times * L // len(windows), _finding(several, window, kernel), mixer,
                    arrays=view, aside=(segments, documents), layer=at, flops=4.0 * model.heads * model.head_dim * pairs,
                )  # fmt: skip
            found.append(got)
        mixed_BTNH = found[0]
        if several:
            mixed_BTNH, _, _ = self._take(
                "game", L, lambda own, found, positions_BT: own.solve_game(found, positions_BT), mixer, ("offset_CN", "tau_N"),
                arrays=tuple(found), aside=layout.positions_BT, layer=at,
            )  # fmt: skip
        return self._take(
            "output", L, lambda own, mixed_BTNH, _: own.output(mixed_BTNH), base, ("out_NHD",), arrays=mixed_BTNH, layer=at
        )

    def _loss(self, x_BTD: Any) -> None:
        cfg, V = self.cfg, self.model.vocab_size
        smoothing = cfg.objective.label_smoothing if cfg.objective.name == "smoothed" else 0.0
        table = "embed_VD" if self.model.tied_embeddings else "output_VD"
        self._take(
            "loss", 1, lambda lm, x_BTD, known: sharded_xent(x_BTD, lm.unembed_VD, *known, V, cfg.optim.z_loss, smoothing),
            lambda lm: lm, (table,), arrays=x_BTD, aside=(self._batch.targets, self._batch.weights), whole=True,
            in_layer=False, reads_again=False, rows=V,
        )  # fmt: skip

    def _updates(self) -> None:
        """Of a few layers, and of all that is no layer's. In the step, those of all layers are one array: of one layer
        alone, starting the many small ones would be most of the time."""
        training, h = Training.of(self.cfg), jax.tree.map(jnp.asarray, Hyperparameters.of(self.cfg.optim, self.cfg.train))
        names = tuple(name for name in named_leaves(self._lm[0]) if not name.startswith(("layers.", "layers[")))
        stacked = self.model.layers // (len(self._lm[0].layers) if isinstance(self._lm[0].layers, tuple) else 1)
        few = math.gcd(stacked, _LAYERS_AT_ONCE)
        layers = jax.tree.map(lambda a: jnp.repeat(a[:1], few, axis=0), _only(self._lm[0], ("layers.", "layers[")))
        others = _only(self._lm[0], names)
        for name, times, trained in (("layers", stacked // few, layers), ("others", 1, others)):
            if jax.tree.leaves(trained):
                ema = jax.tree.map(to_float32, trained) if self.cfg.optim.ema_decay else None
                sums = jax.tree.map(lambda p: 0.5 * p, trained)
                known = (trained, sums, training.fresh_state(h, trained), ema, h, jnp.ones((), bool))
                self._take(
                    f"update-{name}", times, _updating(training), lambda side: side, aside=known, in_layer=False,
                    has_gradient=False, accumulates=False,
                )  # fmt: skip


def _only(module: Any, beginnings: tuple[str, ...]) -> Any:
    """The module with its arrays of such names, and None for the others."""
    named, form = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda x: isinstance(x, Weight | DerivedParam))
    name = lambda path: jax.tree_util.keystr(path).lstrip(".")
    kept = [leaf if beginnings and name(path).startswith(beginnings) else None for path, leaf in named]
    return jax.tree.unflatten(form, kept)


def _matrix_numbers(module: Any, rows: int | None) -> int:
    """Numbers that a token is multiplied with; `rows`: of so many rows of each array."""
    roles = (MATRIX, GATE, TABLE, ADAPTER)

    def count(declared: Declared, a: Any) -> int:
        if not (declared.is_matrix and declared.role in roles):
            return 0
        return a.size // a.shape[0] * (a.shape[0] if rows is None else rows)

    return sum(jax.tree.leaves(map_declared(module, count)))


def _mixing(window: int | None, kernel: str) -> Run:
    return lambda own, x_BTD, layout: own(x_BTD, layout, window=window, kernel=kernel)


def _finding(several: bool, window: int | None, kernel: str) -> Run:
    if several:
        return lambda own, view, aside: own.attend([Rows(*view, *aside)], window=window, kernel=kernel)[0]
    return lambda own, view, aside: own.attend(Rows(*view, *aside), window=window, kernel=kernel)


def _updating(training: Training) -> Run:
    def update(_: Any, __: Any, known: Any) -> Any:
        trained, sums, opt_state, ema, h, good = known
        gradients = Gradients(sums, jnp.ones(()), optax.tree.norm(jax.tree.map(to_float32, sums)))
        made = training.update(h, trained, gradients, opt_state, good, salt_of(h.seed))
        return made, None if ema is None else updated_average(h, ema, made.params, jnp.zeros((), jnp.int32))

    return update
