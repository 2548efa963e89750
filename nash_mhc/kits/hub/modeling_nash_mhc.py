"""Nash-MHC for transformers, in one file that imports only torch and transformers.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

A decoder with RMSNorm, SwiGLU, rotary positions and grouped queries. Four parts are specific to Nash-MHC:
- the residual state has several streams, which a sub-layer (or layer) reads, mixes and writes (`HyperConnection`);
- a short convolution in front of attention mixes a token with the few before it (`ShortConv`);
- a query attends to nearby tokens and to summaries of blocks of r, r^2, ... earlier tokens (`Attention`);
- the outputs of these scales are weighted by their log-sum-exp and a few consensus iterations (`Attention.aggregate`).

Suffixes of names are shapes: B batch, T tokens of this call, S keys, I new rows of a scale, D width, N query heads,
K key and value heads, G = N / K, H head dim, R streams, M = R^2 + 2R coefficients of a sub-layer, C scales, J taps.
Everything that training computes in float32 is float32 here, too.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

QUERY_CHUNK = 512  # queries scored at a time, so attention needs memory linear in T


class NashMhcConfig(PretrainedConfig):
    model_type = "nash_mhc"
    keys_to_ignore_at_inference = ["past_key_values"]
    # Names that transformers and related tools expect.
    attribute_map = {
        "hidden_size": "width", "intermediate_size": "ffn", "num_hidden_layers": "layers",
        "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "tie_word_embeddings": "tied_embeddings",
    }  # fmt: skip

    # fmt: off
    def __init__(
        self,
        vocab_size: int = 257, width: int = 128, layers: int = 2, ffn: int = 384,
        heads: int = 8, kv_heads: int = 8, head_dim: int = 16,
        scales: int = 2,  # resolutions of attention; 1 is plain attention
        ratio: int = 16,  # tokens of one scale per token of the next
        window: int | None = None,  # sliding window of the finest scale, including the token itself; None: all tokens
        full_every: int = 0,  # every n-th layer has no window; 0: all layers have it
        conv_taps: int = 4,  # kernel size of the convolution; 0: no convolution
        aggregation: str = "nash",  # weights of the scales: nash, convex or mean
        nash_iterations: int = 3,
        residual: str = "mhc-layer",  # streams mixed once per layer; "mhc": once per sub-layer; "plain": one stream
        streams: int = 4,
        rope_theta: float = 10_000.0,
        rope_multipliers: list[float] | None = None,  # multiply the head_dim / 2 rotary frequencies
        rope_amplitude: float = 1.0,  # multiplies cosines and sines
        rope_scaling_text: str | None = None,  # the nash_mhc setting that both come from; not used here
        norm_eps: float = 1e-6, qk_norm: bool = True, qkv_bias: bool = False, tied_embeddings: bool = True,
        embed_scale: str = "unit",  # multiply embeddings by sqrt(width); "table": do not
        # Only these are supported.
        ffn_kind: str = "swiglu", mixer: str | None = None, pattern: str | None = None, value_embeddings: int = 0,
        max_position_embeddings: int | None = None,  # training sequence length; longer inputs work
        use_cache: bool = True,
        bos_token_id: int | None = None, eos_token_id: int | None = None, pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        # fmt: on
        self.vocab_size, self.width, self.layers, self.ffn = vocab_size, width, layers, ffn
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scales, self.ratio, self.window, self.full_every = scales, ratio, window, full_every
        self.conv_taps, self.aggregation, self.nash_iterations = conv_taps, aggregation, nash_iterations
        self.residual, self.streams = residual, streams
        self.norm_eps, self.qk_norm, self.qkv_bias, self.embed_scale = norm_eps, qk_norm, qkv_bias, embed_scale
        self.rope_theta, self.rope_multipliers, self.rope_amplitude = rope_theta, rope_multipliers, rope_amplitude
        self.rope_scaling_text = rope_scaling_text
        self.ffn_kind, self.mixer, self.pattern = ffn_kind, mixer, pattern
        self.value_embeddings = value_embeddings
        self.max_position_embeddings, self.use_cache = max_position_embeddings, use_cache
        kwargs.setdefault("tie_word_embeddings", tied_embeddings)
        super().__init__(bos_token_id=bos_token_id, eos_token_id=eos_token_id, pad_token_id=pad_token_id, **kwargs)


class ScaleRows(NamedTuple):
    """The positions of one scale's rows, shared by all layers.

    A row is one token, or the summary of a block of `stride` tokens, which exists once the whole block has been read.
    Sequences of a batch may have different lengths.
    """

    stride: int
    before_B: Tensor  # rows of each sequence from earlier calls
    new_B: Tensor  # rows that this call adds
    capacity: int  # padded number of new rows; those beyond `new_B` are masked
    max_rows: int  # upper bound of the rows of any sequence after this call
    cos_BI1H: Tensor  # [..., H / 2], for the new rows at the position of their last token
    sin_BI1H: Tensor


def rows_of_scales(config: NashMhcConfig, read_B: Tensor, new_B: Tensor, T: int, columns: int) -> list[ScaleRows]:
    """Return the rows of all scales, finest first, after `read_B` tokens of each sequence and `new_B` new ones."""
    half = config.head_dim // 2
    frequency_H = config.rope_theta ** (-torch.arange(half, device=read_B.device, dtype=torch.float32) / half)
    if config.rope_multipliers is not None:
        frequency_H = frequency_H * torch.tensor(config.rope_multipliers, device=read_B.device)
    scales = []
    for stride in (config.ratio**c for c in range(config.scales)):
        before_B, capacity = read_B // stride, math.ceil(T / stride)
        row_BI = before_B[:, None] + torch.arange(capacity, device=read_B.device)
        angle_BI1H = (row_BI * stride + stride - 1).float()[..., None, None] * frequency_H
        cos, sin = (config.rope_amplitude * turn for turn in (angle_BI1H.cos(), angle_BI1H.sin()))
        new_rows_B = (read_B + new_B) // stride - before_B
        scales.append(ScaleRows(stride, before_B, new_rows_B, capacity, columns // stride, cos, sin))
    return scales


def gather_rows(x_BS: Tensor, index_BI: Tensor) -> Tensor:
    """Return x_BS[b, index_BI[b]] for every sequence b."""
    return x_BS[torch.arange(x_BS.shape[0], device=x_BS.device)[:, None], index_BI]


class LayerCache:
    """The cached rows of one layer, by name. Tensors [B, S, ...] are right-aligned: each sequence's latest row is last,
    so short sequences have unused rows at the front."""

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.rows: dict[str, Tensor] = {}

    def extend(self, name: str, new_BI: Tensor, count_B: Tensor, keep: int, zeros: int = 0) -> Tensor:
        """Return the cached rows followed by the new ones, and cache the last `keep` rows.

        Only the first `count_B` new rows are real, the rest is padding. `zeros`: rows of zeros before the first token.
        """
        old = self.rows.get(name)
        if old is None:
            old = new_BI.new_zeros(new_BI.shape[0], zeros, *new_BI.shape[2:])
        all_BS = torch.cat([old, new_BI], dim=1)
        if self.is_enabled:
            keep = min(keep, all_BS.shape[1])
            index_BS = (old.shape[1] + count_B - keep)[:, None] + torch.arange(keep, device=all_BS.device)
            self.rows[name] = gather_rows(all_BS, index_BS.clamp(min=0))
        return all_BS


class NashMhcCache:
    """The cache of all layers: keys and values of the finest scale within its window, all rows of the other scales, and
    the last inputs of convolution and pooling."""

    is_compileable = False  # tensors grow
    is_croppable = False  # rows outside the window are gone

    def __init__(self, config: NashMhcConfig, batch: int, device: torch.device) -> None:
        self.layers = [LayerCache(is_enabled=True) for _ in range(config.layers)]
        self.read_B = torch.zeros(batch, dtype=torch.long, device=device)  # tokens of each sequence, without padding
        self.columns = 0  # columns of the batch read so far, including padding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.read_B = self.read_B[beam_idx.to(self.read_B.device)]
        for layer in self.layers:
            layer.rows = {name: rows[beam_idx.to(rows.device)] for name, rows in layer.rows.items()}


def to_nash_cache(cache: Any, config: NashMhcConfig, batch: int, device: torch.device) -> NashMhcCache:
    """Return a NashMhcCache. An empty cache of transformers is converted in place: the caller may pass it again."""
    if isinstance(cache, NashMhcCache):
        return cache
    if not hasattr(cache, "get_seq_length") or cache.get_seq_length():
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} that already holds tokens, which Nash-MHC cannot use; omit it, or "
            "pass an empty cache or the past_key_values that this model returned"
        )
    cache.__dict__.clear()
    cache.__class__ = NashMhcCache
    cache.__init__(config, batch, device)
    return cache


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse * self.weight.float()).to(x.dtype)


class ShortConv(nn.Module):
    """Causal depthwise convolution over tokens; tap 0 is the token itself."""

    def __init__(self, config: NashMhcConfig) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(config.conv_taps, config.width))
        nn.init.ones_(self.taps[0])

    def forward(self, x_BTD: Tensor, tokens: ScaleRows, cache: LayerCache) -> Tensor:
        T, before = x_BTD.shape[1], self.taps.shape[0] - 1
        all_BSD = cache.extend("convolved", x_BTD, tokens.new_B, keep=before, zeros=before).float()
        taps_JD = self.taps.float()
        return sum(tap_D * all_BSD[:, before - j :][:, :T] for j, tap_D in enumerate(taps_JD)).to(x_BTD.dtype)


class Attention(nn.Module):
    """Attention at several resolutions. Keys and values are projected once and pooled for the coarser scales. Every
    query attends to each scale, to the finest within its window. One scale is ordinary attention."""

    def __init__(self, config: NashMhcConfig, window: int | None) -> None:
        super().__init__()
        D, N, K, H = config.width, config.heads, config.kv_heads, config.head_dim
        self.head_dim, self.window, self.ratio = H, window, config.ratio
        self.aggregation, self.iterations = config.aggregation, config.nash_iterations
        self.q_proj = nn.Linear(D, N * H, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, K * H, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, K * H, bias=config.qkv_bias)
        self.o_proj = nn.Linear(N * H, D, bias=False)
        self.q_norm = RMSNorm(H, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(H, config.norm_eps) if config.qk_norm else nn.Identity()
        if config.scales > 1:
            # Initially, a summary is the mean of the current block and ignores the one before.
            mean_J = torch.cat([torch.zeros(config.ratio), torch.full((config.ratio,), 1.0 / config.ratio)])
            taps_CJKH = mean_J[None, :, None, None].expand(config.scales - 1, -1, K, H)
            self.pool_k, self.pool_v = nn.Parameter(taps_CJKH.clone()), nn.Parameter(taps_CJKH.clone())
            self.offset = nn.Parameter(torch.full((config.scales - 1, N), -1.0))
            self.tau = nn.Parameter(torch.full((N,), math.log(math.expm1(0.05))))  # before softplus

    def forward(self, x_BTD: Tensor, scales: list[ScaleRows], cache: LayerCache) -> Tensor:
        q, k, v = (p(x_BTD).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q_BTNH = rotate(self.q_norm(q.float()), scales[0]).to(q.dtype)
        keys_values = []
        for c, rows in enumerate(scales):
            if c:
                k = self.pool(f"k_below{c}", self.pool_k[c - 1], k, scales[c - 1], rows, cache)
                v = self.pool(f"v_below{c}", self.pool_v[c - 1], v, scales[c - 1], rows, cache)
            keep = self.window - 1 if c == 0 and self.window is not None else rows.max_rows
            # Pooling comes before normalization and rotation: a sum of rotated keys would average phases.
            keys_BSKH = rotate(self.k_norm(k.float()), rows).to(k.dtype)
            keys_BSKH = cache.extend(f"keys{c}", keys_BSKH, rows.new_B, keep)
            keys_values.append((rows, keys_BSKH, cache.extend(f"values{c}", v, rows.new_B, keep)))
        starts = range(0, q_BTNH.shape[1], QUERY_CHUNK)
        mixed = [self.attend_to_scales(q_BTNH[:, t : t + QUERY_CHUNK], t, keys_values) for t in starts]
        return self.o_proj(torch.cat(mixed, dim=1).flatten(2))

    def pool(self, name: str, taps_JKH: Tensor, z_BTKH: Tensor, below: ScaleRows, rows: ScaleRows, cache: LayerCache) -> Tensor:
        """Return the new rows of a coarse scale: weighted sums of two blocks of r rows of the scale below, the current
        block and the one before it. Rows before the first token are zeros."""
        r = self.ratio
        all_BSKH = cache.extend(name, z_BTKH, below.new_B, keep=2 * r - 1, zeros=2 * r - 1)
        # The first block to complete started `before % r` rows ago, the block before it r rows earlier.
        index_BS = (r - 1 - below.before_B % r)[:, None] + torch.arange((rows.capacity + 1) * r, device=z_BTKH.device)
        all_BSKH = gather_rows(all_BSKH, index_BS.clamp(max=all_BSKH.shape[1] - 1))
        blocks_BIJKH = all_BSKH.unflatten(1, (rows.capacity + 1, r)).float()
        before, own = taps_JKH.float().split(r)
        return ((blocks_BIJKH[:, :-1] * before).sum(2) + (blocks_BIJKH[:, 1:] * own).sum(2)).to(z_BTKH.dtype)

    def attend_to_scales(self, q_BTNH: Tensor, start: int, keys_values: list[tuple[ScaleRows, Tensor, Tensor]]) -> Tensor:
        """Return the attention output of a chunk of queries, of which the first is token `start` of this call."""
        T, outs, lses = q_BTNH.shape[1], [], []
        position_BT1 = (keys_values[0][0].before_B[:, None] + start + torch.arange(T, device=q_BTNH.device))[..., None]
        for c, (rows, k_BSKH, v_BSKH) in enumerate(keys_values):
            window, old = None if c else self.window, k_BSKH.shape[1] - rows.capacity
            # Slice off rows that are in the future, or outside the window, of all these queries.
            first = 0 if window is None else max(0, old + start - window + 1)
            end = old + math.ceil((start + T) / rows.stride)
            row_B1S = (rows.before_B[:, None] - old + torch.arange(first, end, device=q_BTNH.device))[:, None]
            # A summary is visible to the blocks after its own, so that no token sees a later one.
            last_BT1 = position_BT1 // rows.stride - (1 if c else 0)
            visible_BTS = (row_B1S >= 0) & (row_B1S <= last_BT1)
            if window is not None:
                visible_BTS = visible_BTS & (row_B1S > last_BT1 - window)
            out_BTNH, lse_BTN = attend(q_BTNH, k_BSKH[:, first:end], v_BSKH[:, first:end], visible_BTS, zero_key=c > 0)
            if c:  # a coarse scale takes part once it has a visible row
                lse_BTN = (lse_BTN + self.offset[c - 1].float()).masked_fill(position_BT1 < rows.stride, -math.inf)
            outs.append(out_BTNH)
            lses.append(lse_BTN)
        return outs[0] if len(outs) == 1 else self.aggregate(torch.stack(outs), torch.stack(lses)).to(q_BTNH.dtype)

    def aggregate(self, out_CBTNH: Tensor, lse_CBTN: Tensor) -> Tensor:
        """Return the weighted sum of the scales' outputs.

        Weights from the log-sum-exp alone are those of one softmax over the keys of all scales. Each iteration then
        reduces a scale's weight by its distance from the weighted mean.
        """
        out_CBTNH = out_CBTNH.float()
        uniform_CBTN = torch.zeros_like(lse_CBTN).masked_fill(lse_CBTN == -math.inf, -math.inf)
        weight_CBTN = torch.softmax(uniform_CBTN if self.aggregation == "mean" else lse_CBTN, dim=0)
        for _ in range(self.iterations if self.aggregation == "nash" else 0):
            consensus_BTNH = (weight_CBTN[..., None] * out_CBTNH).sum(0)
            error_CBTN = (out_CBTNH - consensus_BTNH).square().mean(-1)
            weight_CBTN = torch.softmax(lse_CBTN - F.softplus(self.tau.float()) * error_CBTN, dim=0)
        return (weight_CBTN[..., None] * out_CBTNH).sum(0)


def rotate(x_BINH: Tensor, rows: ScaleRows) -> Tensor:
    """Apply rotary position embeddings to the channel pairs (i, i + H/2)."""
    a, b = x_BINH.chunk(2, dim=-1)
    return torch.cat([a * rows.cos_BI1H - b * rows.sin_BI1H, b * rows.cos_BI1H + a * rows.sin_BI1H], dim=-1)


def attend(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, visible_BTS: Tensor, zero_key: bool) -> tuple[Tensor, Tensor]:
    """Return softmax(q k / sqrt(H)) v and the log-sum-exp of the scores, [B, T, N].

    `zero_key`: add a key and value of zeros.
    """
    q_BTKGH = q_BTNH.float().unflatten(2, (k_BSKH.shape[2], -1)) * q_BTNH.shape[-1] ** -0.5
    scores_BKGTS = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH.float())
    scores_BKGTS = scores_BKGTS.masked_fill(~visible_BTS[:, None, None], -math.inf)
    top_BKGT1 = scores_BKGTS.amax(-1, keepdim=True).detach()
    top_BKGT1 = top_BKGT1.clamp(min=0.0) if zero_key else top_BKGT1
    weights_BKGTS = torch.exp(scores_BKGTS - top_BKGT1)
    total_BKGT1 = weights_BKGTS.sum(-1, keepdim=True) + (torch.exp(-top_BKGT1) if zero_key else 0.0)
    out_BKGTH = torch.einsum("bkgts,bskh->bkgth", weights_BKGTS.to(v_BSKH.dtype), v_BSKH).float() / total_BKGT1
    lse_BKGT1 = top_BKGT1 + total_BKGT1.log()
    by_token = lambda x: x.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return by_token(out_BKGTH).to(v_BSKH.dtype), by_token(lse_BKGT1)[..., 0]


class PlainResidual(nn.Module):
    """x + f(x)."""

    def read(self, x_BTD: Tensor) -> tuple[Tensor, Any]:
        return x_BTD, None

    def write(self, x_BTD: Tensor, y_BTD: Tensor, maps: Any) -> Tensor:
        return x_BTD + y_BTD


class HyperConnection(nn.Module):
    """A sub-layer f on R streams: y = f(pre X), X' = res X + post y, with coefficients computed from the streams X.

    `res` is doubly stochastic (entries at least 0, rows and columns sum to 1), so that mixing does not amplify the
    streams at any depth. All coefficients and sums are float32.
    """

    def __init__(self, config: NashMhcConfig) -> None:
        super().__init__()
        R, D = config.streams, config.width
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.randn(R * R + 2 * R, R * D) * (R * D) ** -0.5)
        # Initially all streams are read and written with equal weight and hardly mixed.
        bias = [torch.full((R,), -math.log(R - 1.0)), torch.zeros(R), 6.0 * torch.eye(R).flatten()]
        self.bias = nn.Parameter(torch.cat(bias))
        self.gain = nn.Parameter(torch.full((3,), 0.01))  # for pre, post and res

    def read(self, x_BTRD: Tensor) -> tuple[Tensor, Any]:
        """Return the input of the sub-layer, and (post, res) for `write`."""
        R, wide_BTRD = x_BTRD.shape[2], x_BTRD.float()
        inverse_rms_BT1 = torch.rsqrt(wide_BTRD.square().mean((-2, -1)) + self.eps)[..., None]
        raw_BTM = F.linear(wide_BTRD.flatten(2), self.weight.float()) * inverse_rms_BT1
        sizes = [R, R, R * R]
        parts = zip(raw_BTM.split(sizes, -1), self.bias.float().split(sizes), self.gain.float(), strict=True)
        pre_BTR, post_BTR, res_BTM = (gain * raw + bias for raw, bias, gain in parts)
        input_BTD = torch.einsum("btr,btrd->btd", pre_BTR.sigmoid(), wide_BTRD).to(x_BTRD.dtype)
        res_BTRR = doubly_stochastic(res_BTM.unflatten(-1, (R, R)))
        return input_BTD, (2.0 * post_BTR.sigmoid(), res_BTRR)

    def write(self, x_BTRD: Tensor, y_BTD: Tensor, maps: Any) -> Tensor:
        post_BTR, res_BTRR = maps
        return (res_BTRR @ x_BTRD.float() + post_BTR[..., None] * y_BTD.float()[:, :, None]).to(x_BTRD.dtype)


class _DoublyStochastic(torch.autograd.Function):
    """diag(u) exp(logits) diag(v) with rows and columns that sum to 1; the gradient is that of the exact solution."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        # exp(-30) relative to the column maximum is close to 0 and keeps every sum above 0.
        k = torch.exp((logits - logits.amax(-2, keepdim=True)).clamp(min=-30.0))
        v = 1.0 / k.sum(-2, keepdim=True)
        for _ in range(3):
            v = 1.0 / (k / (k * v).sum(-1, keepdim=True)).sum(-2, keepdim=True)
        for _ in range(5):
            p = _normalize_rows(k * v)
            step = _solve_laplacian(p, 1.0 - p.sum(-2))[..., None, :]
            v = v * torch.exp((step - step.mean(-1, keepdim=True)).clamp(-2.0, 2.0))
        p = _normalize_columns(_normalize_rows(k * v))
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        shift = _solve_laplacian(p, _centered(p, grad).sum(-2))
        return _centered(p, grad - shift[..., None, :])


def doubly_stochastic(logits: Tensor) -> Tensor:
    """Project matrices [..., R, R]: Sinkhorn iterations, then Newton steps on the column scales."""
    return _DoublyStochastic.apply(logits)


def _normalize_rows(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True)


def _normalize_columns(p: Tensor) -> Tensor:
    """Move the excess of columns above 1 to the others; only rounding, unless logits differ by 20 or more."""
    column = p.sum(-2, keepdim=True)
    left, lack = p / column.clamp(min=1.0), (1.0 - column).clamp(min=0.0)
    return left + (p - left).sum(-1, keepdim=True) * (lack / lack.sum(-1, keepdim=True).clamp(min=1e-12))


def _centered(p: Tensor, g: Tensor) -> Tensor:
    """p_ij (g_ij - sum_k p_ik g_ik), from differences, because products of large numbers would cancel."""
    return p * (p[..., None, :] * (g[..., :, None] - g[..., None, :])).sum(-1)


def _solve_laplacian(p: Tensor, b: Tensor) -> Tensor:
    """Solve (diag(W 1) - W) x = b, x[-1] = 0, where W = p^T p off the diagonal, by elimination without subtraction."""
    weight, eliminated = (p[..., :, :, None] * p[..., :, None, :]).sum(-3), []
    for _ in range(b.shape[-1] - 1):
        row, rest, value = weight[..., 0, 1:], weight[..., 1:, 1:], b[..., :1]
        degree = row.sum(-1, keepdim=True) + 1e-30
        eliminated.append((row, degree, value))
        b, weight = b[..., 1:] + row / degree * value, rest + (row / degree)[..., None] * row[..., None, :]
    x = torch.zeros_like(b)
    for row, degree, value in reversed(eliminated):
        x = torch.cat([(value + (row * x).sum(-1, keepdim=True)) / degree, x], -1)
    return x


class SwiGLU(nn.Module):
    def __init__(self, config: NashMhcConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    def __init__(self, config: NashMhcConfig, number: int) -> None:
        super().__init__()
        residual = (lambda: HyperConnection(config)) if config.residual != "plain" else PlainResidual
        has_window = not (config.full_every and (number + 1) % config.full_every == 0)
        self.attention_residual = residual()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention_conv = ShortConv(config) if config.conv_taps else None
        self.attention = Attention(config, config.window if has_window else None)
        self.mixes_per_layer = config.residual == "mhc-layer"
        self.ffn_residual = PlainResidual() if self.mixes_per_layer else residual()
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, state: Tensor, scales: list[ScaleRows], cache: LayerCache) -> Tensor:
        x_BTD, maps = self.attention_residual.read(state)
        x_BTD = self.attention_norm(x_BTD)
        mixed_BTD = x_BTD if self.attention_conv is None else self.attention_conv(x_BTD, scales[0], cache)
        y_BTD = self.attention(mixed_BTD, scales, cache)
        if self.mixes_per_layer:
            y_BTD = y_BTD + self.ffn(self.ffn_norm(x_BTD + y_BTD))
            return self.attention_residual.write(state, y_BTD, maps)
        state = self.attention_residual.write(state, y_BTD, maps)
        x_BTD, maps = self.ffn_residual.read(state)
        return self.ffn_residual.write(state, self.ffn(self.ffn_norm(x_BTD)), maps)


class NashMhcPreTrainedModel(PreTrainedModel):
    config_class = NashMhcConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True  # the cache cannot be rewound, which speculative decoding needs
    # Small parameters whose rounding would matter; all others have the dtype of the model.
    _keep_in_fp32_modules_strict = [
        "attention_residual", "ffn_residual", "attention_norm", "ffn_norm", "q_norm", "k_norm", "norm",
        "attention_conv", "pool_k", "pool_v", "offset", "tau",
    ]  # fmt: skip


class NashMhcModel(NashMhcPreTrainedModel):
    def __init__(self, config: NashMhcConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """`output_hidden_states` gives the sum of the streams before each layer, and the final output."""
        if kwargs.get("position_ids") is not None:
            raise ValueError("position_ids is not supported: Nash-MHC counts positions from the first token in attention_mask")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions is not supported: Nash-MHC has no single matrix of attention weights")
        config = self.config
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if config.embed_scale == "unit":
            x_BTD = x_BTD * math.sqrt(config.width)
        B, T, _ = x_BTD.shape
        cache = None
        if past_key_values is not None:
            cache = to_nash_cache(past_key_values, config, B, x_BTD.device)
        elif config.use_cache if use_cache is None else use_cache:
            cache = NashMhcCache(config, B, x_BTD.device)
        read_B = torch.zeros(B, dtype=torch.long, device=x_BTD.device) if cache is None else cache.read_B

        # Move all padding to the right: blocks and positions count from the first token, and padding is never visible.
        new_B, order_BT = torch.full_like(read_B, T), None
        if attention_mask is not None:
            real_BT = attention_mask[:, -T:].to(x_BTD.device) != 0
            new_B, order_BT = real_BT.sum(1), torch.argsort((~real_BT).byte(), dim=1, stable=True)
            x_BTD = gather_rows(x_BTD, order_BT)

        columns = T + (0 if cache is None else cache.columns)
        scales = rows_of_scales(config, read_B, new_B, T, columns)
        state = x_BTD if config.residual == "plain" else x_BTD[:, :, None].expand(-1, -1, config.streams, -1)
        sum_streams = lambda state: state if config.residual == "plain" else state.float().sum(2).to(state.dtype)
        restore_order = lambda x_BTD: x_BTD if order_BT is None else gather_rows(x_BTD, order_BT.argsort(dim=1))
        has_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = []
        for number, layer in enumerate(self.layers):
            hidden += [restore_order(sum_streams(state))] if has_hidden else []
            state = layer(state, scales, LayerCache(is_enabled=False) if cache is None else cache.layers[number])
        x_BTD = restore_order(self.norm(sum_streams(state)))
        if cache is not None:
            cache.read_B, cache.columns = read_B + new_B, columns
        output = BaseModelOutputWithPast(
            last_hidden_state=x_BTD, past_key_values=cache, hidden_states=(*hidden, x_BTD) if has_hidden else None
        )
        return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()


class NashMhcForCausalLM(NashMhcPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NashMhcConfig) -> None:
        super().__init__(config)
        self.model = NashMhcModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass of `generate` creates the cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        options = {"use_cache": use_cache, "output_hidden_states": output_hidden_states, "return_dict": True}
        outputs = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, **options, **kwargs)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(outputs.last_hidden_state[:, positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits_BTV, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
