"""Nash-MHC for transformers, in one file that needs nothing but torch and transformers.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

It is a decoder with RMSNorm, SwiGLU, rotary positions and grouped queries, and four parts that are its own:
- a token's residual state is several streams, which a sub-layer, or a layer, reads, mixes and writes
  (`HyperConnection`);
- a short convolution mixes a token with the few before it, in front of attention (`ShortConv`);
- every query looks at the tokens near by and at summaries of the blocks of r, r^2, ... tokens before (`Attention`);
- what the scales found is weighed by how much it is, and by a small game among them (`Attention.settle`).

Letters at the end of names are shapes: B batch, T tokens of this call, S rows that are looked at, I rows of a coarse
scale, D width, N query heads, K key and value heads, G = N / K, H head dim, R streams, M = R^2 + 2R coefficients of a
sub-layer, C scales, J taps. What training computes in float32, whatever the dtype, is float32 here.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

QUERIES_AT_ONCE = 512  # whose scores attention makes together: its memory then grows with T, not with T squared


class NashMhcConfig(PretrainedConfig):
    model_type = "nash_mhc"
    keys_to_ignore_at_inference = ["past_key_values"]
    # The names that transformers and the tools around it ask for.
    attribute_map = {
        "hidden_size": "width", "intermediate_size": "ffn", "num_hidden_layers": "layers",
        "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "tie_word_embeddings": "tied_embeddings",
    }  # fmt: skip

    # fmt: off
    def __init__(
        self,
        vocab_size: int = 257, width: int = 128, layers: int = 2, ffn: int = 384,
        heads: int = 8, kv_heads: int = 8, head_dim: int = 16,
        scales: int = 2,  # resolutions that attention looks at; 1 is plain attention
        ratio: int = 16,  # how much coarser each is than the one before
        window: int | None = None,  # tokens that the finest one looks back, itself included; None: all
        full_every: int = 0,  # one layer in so many has no window; 0: none of them
        conv_taps: int = 4,  # tokens that the convolution mixes, itself included; 0: no convolution
        aggregation: str = "nash",  # how the scales find their weights: nash, convex or mean
        nash_iterations: int = 3,
        residual: str = "mhc-layer",  # streams that each layer mixes; "mhc": each sub-layer; "plain": one that is added to
        streams: int = 4,
        rope_theta: float = 10_000.0,
        rope_multipliers: list[float] | None = None,  # of the head_dim / 2 rotary frequencies
        rope_amplitude: float = 1.0,  # of cosines and sines
        rope_scaling_text: str | None = None,  # what both were made from, for those who read the folder without this file
        norm_eps: float = 1e-6, qk_norm: bool = True, qkv_bias: bool = False, tied_embeddings: bool = True,
        embed_scale: str = "unit",  # embeddings enter times sqrt(width); "table": as they are
        ffn_kind: str = "swiglu", mixer: str | None = None, pattern: str | None = None,  # no others are exported
        max_position_embeddings: int | None = None,  # tokens of a row in training; positions have no limit
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
        self.max_position_embeddings, self.use_cache = max_position_embeddings, use_cache
        kwargs.setdefault("tie_word_embeddings", tied_embeddings)
        super().__init__(bos_token_id=bos_token_id, eos_token_id=eos_token_id, pad_token_id=pad_token_id, **kwargs)


class Rows(NamedTuple):
    """Where the rows of one scale stand, the same in all layers. A row is one token, or the summary of `stride` of
    them: it is there once the last of these has been read. Sequences of a batch may be at different places."""

    stride: int
    before_B: Tensor  # rows of each sequence that earlier calls have left behind
    new_B: Tensor  # rows that this call adds
    room: int  # for the new rows of any sequence; what lies beyond `new_B` is never looked at
    most: int  # rows that any sequence can have after this call
    cos_BI1H: Tensor  # of the new rows, each at the position of its last token; half a head wide
    sin_BI1H: Tensor


def lay_out(config: NashMhcConfig, read_B: Tensor, new_B: Tensor, T: int, columns: int) -> list[Rows]:
    """The rows of all scales, finest first, after `read_B` tokens of each sequence and with `new_B` more of them."""
    half = config.head_dim // 2
    frequency_H = config.rope_theta ** (-torch.arange(half, device=read_B.device, dtype=torch.float32) / half)
    if config.rope_multipliers is not None:
        frequency_H = frequency_H * torch.tensor(config.rope_multipliers, device=read_B.device)
    scales = []
    for stride in (config.ratio**c for c in range(config.scales)):
        before_B, room = read_B // stride, math.ceil(T / stride)
        row_BI = before_B[:, None] + torch.arange(room, device=read_B.device)
        angle_BI1H = (row_BI * stride + stride - 1).float()[..., None, None] * frequency_H
        cos, sin = (config.rope_amplitude * turn for turn in (angle_BI1H.cos(), angle_BI1H.sin()))
        scales.append(Rows(stride, before_B, (read_B + new_B) // stride - before_B, room, columns // stride, cos, sin))
    return scales


def rows_at(x_BS: Tensor, index_BI: Tensor) -> Tensor:
    """Of each sequence its own rows."""
    return x_BS[torch.arange(x_BS.shape[0], device=x_BS.device)[:, None], index_BI]


class Memory:
    """What one layer keeps of the tokens it has read, by name. Each tensor [B, S, ...] ends with the latest row of
    each sequence; so what is before the first row of a short one is at the front, where nobody looks."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.rows: dict[str, Tensor] = {}

    def extend(self, name: str, new_BI: Tensor, count_B: Tensor, keep: int, zeros: int = 0) -> Tensor:
        """The rows kept so far, then the new ones. Of all, `count_B` new ones included, the last `keep` are kept.

        `zeros`: rows of zeros that stand before the first.
        """
        old = self.rows.get(name)
        if old is None:
            old = new_BI.new_zeros(new_BI.shape[0], zeros, *new_BI.shape[2:])
        all_BS = torch.cat([old, new_BI], dim=1)
        if self.keeps:
            keep = min(keep, all_BS.shape[1])
            index_BS = (old.shape[1] + count_B - keep)[:, None] + torch.arange(keep, device=all_BS.device)
            self.rows[name] = rows_at(all_BS, index_BS.clamp(min=0))
        return all_BS


class NashMhcCache:
    """What all layers keep for the tokens to come: of the finest scale as many keys and values as its window sees, of
    the others all rows, and the few rows that convolution and pooling still need."""

    is_compileable = False  # it grows
    is_croppable = False  # and what has left a window does not come back

    def __init__(self, config: NashMhcConfig, batch: int, device: torch.device) -> None:
        self.layers = [Memory(keeps=True) for _ in range(config.layers)]
        self.read_B = torch.zeros(batch, dtype=torch.long, device=device)  # tokens of each sequence, without padding
        self.columns = 0  # places of the batch that were read, padding included

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.read_B = self.read_B[beam_idx.to(self.read_B.device)]
        for memory in self.layers:
            memory.rows = {name: rows[beam_idx.to(rows.device)] for name, rows in memory.rows.items()}


def own_cache(cache: Any, config: NashMhcConfig, batch: int, device: torch.device) -> NashMhcCache:
    """The cache itself, if it is one of ours. An empty one of transformers becomes one in place: its maker can pass the
    same object again."""
    if isinstance(cache, NashMhcCache):
        return cache
    if not hasattr(cache, "get_seq_length") or cache.get_seq_length():
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} with tokens in it, and Nash-MHC keeps more than keys and values; "
            "leave it out, or pass an empty one or that of an earlier output"
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
    """Mixes each channel of a token with that of the few before it; tap 0 is the token's own."""

    def __init__(self, config: NashMhcConfig) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(config.conv_taps, config.width))
        nn.init.ones_(self.taps[0])

    def forward(self, x_BTD: Tensor, tokens: Rows, memory: Memory) -> Tensor:
        T, before = x_BTD.shape[1], self.taps.shape[0] - 1
        all_BSD = memory.extend("convolved", x_BTD, tokens.new_B, keep=before, zeros=before).float()
        taps_JD = self.taps.float()
        return sum(tap_D * all_BSD[:, before - j :][:, :T] for j, tap_D in enumerate(taps_JD)).to(x_BTD.dtype)


class Attention(nn.Module):
    """Attention at several resolutions. Keys and values are projected once and summarised for the coarser ones;
    every query looks at each of them, at the finest through its window. One scale is ordinary attention."""

    def __init__(self, config: NashMhcConfig, window: int | None) -> None:
        super().__init__()
        D, N, K, H = config.width, config.heads, config.kv_heads, config.head_dim
        self.head_dim, self.window, self.ratio = H, window, config.ratio
        self.aggregation, self.rounds = config.aggregation, config.nash_iterations
        self.q_proj = nn.Linear(D, N * H, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, K * H, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, K * H, bias=config.qkv_bias)
        self.o_proj = nn.Linear(N * H, D, bias=False)
        self.q_norm = RMSNorm(H, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(H, config.norm_eps) if config.qk_norm else nn.Identity()
        if config.scales > 1:
            # A summary begins as the mean of its own block, with nothing of the block before.
            mean_J = torch.cat([torch.zeros(config.ratio), torch.full((config.ratio,), 1.0 / config.ratio)])
            taps_CJKH = mean_J[None, :, None, None].expand(config.scales - 1, -1, K, H)
            self.pool_k, self.pool_v = nn.Parameter(taps_CJKH.clone()), nn.Parameter(taps_CJKH.clone())
            self.offset = nn.Parameter(torch.full((config.scales - 1, N), -1.0))
            self.tau = nn.Parameter(torch.full((N,), math.log(math.expm1(0.05))))  # before softplus

    def forward(self, x_BTD: Tensor, scales: list[Rows], memory: Memory) -> Tensor:
        tokens = scales[0]
        q, k, v = (p(x_BTD).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q_BTNH = turned(self.q_norm(q.float()), tokens).to(q.dtype)
        seen = []
        for c, rows in enumerate(scales):
            if c:
                k = self.summarised(f"k_below{c}", self.pool_k[c - 1], k, scales[c - 1 : c + 1], memory)
                v = self.summarised(f"v_below{c}", self.pool_v[c - 1], v, scales[c - 1 : c + 1], memory)
            keep = self.window - 1 if c == 0 and self.window is not None else rows.most
            # Summaries are normalised and turned after they were made: sums of turned keys would average phases.
            keys_BSKH = turned(self.k_norm(k.float()), rows).to(k.dtype)
            keys_BSKH = memory.extend(f"keys{c}", keys_BSKH, rows.new_B, keep)
            seen.append((rows, keys_BSKH, memory.extend(f"values{c}", v, rows.new_B, keep)))
        starts = range(0, q_BTNH.shape[1], QUERIES_AT_ONCE)
        mixed = [self.look(q_BTNH[:, t : t + QUERIES_AT_ONCE], t, seen) for t in starts]
        return self.o_proj(torch.cat(mixed, dim=1).flatten(2))

    def summarised(self, name: str, taps_JKH: Tensor, z_BTKH: Tensor, scales: list[Rows], memory: Memory) -> Tensor:
        """New rows of a coarse scale, each a weighted sum of 2r rows of the scale below: its own block of r of them
        and the block before it. Before the first row there are zeros."""
        (below, rows), r = scales, self.ratio
        all_BSKH = memory.extend(name, z_BTKH, below.new_B, keep=2 * r - 1, zeros=2 * r - 1)
        # The block that comes to its end first began `before % r` rows ago, and the block before it r rows earlier.
        index_BS = (r - 1 - below.before_B % r)[:, None] + torch.arange((rows.room + 1) * r, device=z_BTKH.device)
        all_BSKH = rows_at(all_BSKH, index_BS.clamp(max=all_BSKH.shape[1] - 1))
        blocks_BIJKH = all_BSKH.unflatten(1, (rows.room + 1, r)).float()
        before, own = taps_JKH.float().split(r)
        return ((blocks_BIJKH[:, :-1] * before).sum(2) + (blocks_BIJKH[:, 1:] * own).sum(2)).to(z_BTKH.dtype)

    def look(self, q_BTNH: Tensor, start: int, seen: list[tuple[Rows, Tensor, Tensor]]) -> Tensor:
        """What some queries, of which the first is token `start` of this call, find at all scales together."""
        T, outs, bids = q_BTNH.shape[1], [], []
        position_BT1 = (seen[0][0].before_B[:, None] + start + torch.arange(T, device=q_BTNH.device))[..., None]
        for c, (rows, k_BSKH, v_BSKH) in enumerate(seen):
            window, old = None if c else self.window, k_BSKH.shape[1] - rows.room
            # Rows that are too late, or too far back, for all of these queries are left out at once.
            first = 0 if window is None else max(0, old + start - window + 1)
            end = old + math.ceil((start + T) / rows.stride)
            row_B1S = (rows.before_B[:, None] - old + torch.arange(first, end, device=q_BTNH.device))[:, None]
            # A summary is seen by the blocks after its own: so no token sees a later one through it.
            last_BT1 = position_BT1 // rows.stride - (1 if c else 0)
            visible_BTS = (row_B1S >= 0) & (row_B1S <= last_BT1)
            if window is not None:
                visible_BTS = visible_BTS & (row_B1S > last_BT1 - window)
            out_BTNH, bid_BTN = attend(q_BTNH, k_BSKH[:, first:end], v_BSKH[:, first:end], visible_BTS, null=c > 0)
            if c:  # a scale bids once a block has ended before the token's own; the tokens near by always do
                bid_BTN = (bid_BTN + self.offset[c - 1].float()).masked_fill(position_BT1 < rows.stride, -math.inf)
            outs.append(out_BTNH)
            bids.append(bid_BTN)
        return outs[0] if len(outs) == 1 else self.settle(torch.stack(outs), torch.stack(bids)).to(q_BTNH.dtype)

    def settle(self, out_CBTNH: Tensor, bid_CBTN: Tensor) -> Tensor:
        """What the scales found, weighed. The bids alone give the weights of one softmax over all keys of all scales;
        in the game, each scale then loses weight as far as it is from the consensus, and the consensus moves."""
        out_CBTNH = out_CBTNH.float()
        even_CBTN = torch.zeros_like(bid_CBTN).masked_fill(bid_CBTN == -math.inf, -math.inf)
        weight_CBTN = torch.softmax(even_CBTN if self.aggregation == "mean" else bid_CBTN, dim=0)
        for _ in range(self.rounds if self.aggregation == "nash" else 0):
            consensus_BTNH = (weight_CBTN[..., None] * out_CBTNH).sum(0)
            error_CBTN = (out_CBTNH - consensus_BTNH).square().mean(-1)
            weight_CBTN = torch.softmax(bid_CBTN - F.softplus(self.tau.float()) * error_CBTN, dim=0)
        return (weight_CBTN[..., None] * out_CBTNH).sum(0)


def turned(x_BINH: Tensor, rows: Rows) -> Tensor:
    """Rotary positions: channels i and i + H/2 of a head are turned by an angle that grows with the position."""
    a, b = x_BINH.chunk(2, dim=-1)
    return torch.cat([a * rows.cos_BI1H - b * rows.sin_BI1H, b * rows.cos_BI1H + a * rows.sin_BI1H], dim=-1)


def attend(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, visible_BTS: Tensor, null: bool) -> tuple[Tensor, Tensor]:
    """(softmax(q k / sqrt(H)) v, the evidence [B, T, N]: the log of the sum that this softmax divides by).

    `null`: beside the keys there is one of zeros, whose value is nothing.
    """
    q_BTKGH = q_BTNH.float().unflatten(2, (k_BSKH.shape[2], -1)) * q_BTNH.shape[-1] ** -0.5
    scores_BKGTS = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH.float())
    scores_BKGTS = scores_BKGTS.masked_fill(~visible_BTS[:, None, None], -math.inf)
    top_BKGT1 = scores_BKGTS.amax(-1, keepdim=True).detach()
    top_BKGT1 = top_BKGT1.clamp(min=0.0) if null else top_BKGT1
    weights_BKGTS = torch.exp(scores_BKGTS - top_BKGT1)
    total_BKGT1 = weights_BKGTS.sum(-1, keepdim=True) + (torch.exp(-top_BKGT1) if null else 0.0)
    out_BKGTH = torch.einsum("bkgts,bskh->bkgth", weights_BKGTS.to(v_BSKH.dtype), v_BSKH).float() / total_BKGT1
    evidence_BKGT1 = top_BKGT1 + total_BKGT1.log()
    by_token = lambda x: x.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return by_token(out_BKGTH).to(v_BSKH.dtype), by_token(evidence_BKGT1)[..., 0]


class PlainResidual(nn.Module):
    """x + f(x)."""

    def read(self, x_BTD: Tensor) -> tuple[Tensor, Any]:
        return x_BTD, None

    def write(self, x_BTD: Tensor, y_BTD: Tensor, maps: Any) -> Tensor:
        return x_BTD + y_BTD


class HyperConnection(nn.Module):
    """A sub-layer f on R streams: y = f(pre X), X' = res X + post y, with coefficients from the token's own streams.

    `res` is doubly stochastic (entries at least 0, rows and columns that sum to 1), so that streams are mixed and
    never grow by it, over any depth. All coefficients and sums are float32.
    """

    def __init__(self, config: NashMhcConfig) -> None:
        super().__init__()
        R, D = config.streams, config.width
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.randn(R * R + 2 * R, R * D) * (R * D) ** -0.5)
        # In the beginning every stream is read alike and written alike, and each keeps to itself.
        bias = [torch.full((R,), -math.log(R - 1.0)), torch.zeros(R), 6.0 * torch.eye(R).flatten()]
        self.bias = nn.Parameter(torch.cat(bias))
        self.gain = nn.Parameter(torch.full((3,), 0.01))  # of pre, post and res

    def read(self, x_BTRD: Tensor) -> tuple[Tensor, Any]:
        """(what the sub-layer reads, (post, res) for `write`)."""
        R, wide_BTRD = x_BTRD.shape[2], x_BTRD.float()
        inverse_rms_BT1 = torch.rsqrt(wide_BTRD.square().mean((-2, -1)) + self.eps)[..., None]
        raw_BTM = F.linear(wide_BTRD.flatten(2), self.weight.float()) * inverse_rms_BT1
        sizes = [R, R, R * R]
        parts = zip(raw_BTM.split(sizes, -1), self.bias.float().split(sizes), self.gain.float(), strict=True)
        pre_BTR, post_BTR, res_BTM = (gain * raw + bias for raw, bias, gain in parts)
        reading_BTD = torch.einsum("btr,btrd->btd", pre_BTR.sigmoid(), wide_BTRD).to(x_BTRD.dtype)
        res_BTRR = doubly_stochastic(res_BTM.unflatten(-1, (R, R)))
        return reading_BTD, (2.0 * post_BTR.sigmoid(), res_BTRR)

    def write(self, x_BTRD: Tensor, y_BTD: Tensor, maps: Any) -> Tensor:
        post_BTR, res_BTRR = maps
        return (res_BTRR @ x_BTRD.float() + post_BTR[..., None] * y_BTD.float()[:, :, None]).to(x_BTRD.dtype)


class _DoublyStochastic(torch.autograd.Function):
    """diag(u) exp(logits) diag(v) with rows and columns that sum to 1, and the gradient of the limit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        # 30 below the largest of its column is close to 0 and keeps every sum above 0.
        k = torch.exp((logits - logits.amax(-2, keepdim=True)).clamp(min=-30.0))
        v = 1.0 / k.sum(-2, keepdim=True)
        for _ in range(3):
            v = 1.0 / (k / (k * v).sum(-1, keepdim=True)).sum(-2, keepdim=True)
        for _ in range(5):
            p = _rows_to_1(k * v)
            step = _solve_laplacian(p, 1.0 - p.sum(-2))[..., None, :]
            v = v * torch.exp((step - step.mean(-1, keepdim=True)).clamp(-2.0, 2.0))
        p = _columns_to_1(_rows_to_1(k * v))
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        shift = _solve_laplacian(p, _centered(p, grad).sum(-2))
        return _centered(p, grad - shift[..., None, :])


def doubly_stochastic(logits: Tensor) -> Tensor:
    """Sinkhorn rounds, then Newton steps on the column scales, for matrices [..., R, R]."""
    return _DoublyStochastic.apply(logits)


def _rows_to_1(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True)


def _columns_to_1(p: Tensor) -> Tensor:
    """Columns above 1 give, the others take: rounding only, except for logits that differ by 20 and more."""
    column = p.sum(-2, keepdim=True)
    left, lack = p / column.clamp(min=1.0), (1.0 - column).clamp(min=0.0)
    return left + (p - left).sum(-1, keepdim=True) * (lack / lack.sum(-1, keepdim=True).clamp(min=1e-12))


def _centered(p: Tensor, g: Tensor) -> Tensor:
    """p_ij (g_ij - sum_k p_ik g_ik), from differences: products of large numbers would cancel."""
    return p * (p[..., None, :] * (g[..., :, None] - g[..., None, :])).sum(-1)


def _solve_laplacian(p: Tensor, b: Tensor) -> Tensor:
    """x with (diag(W 1) - W) x = b and x[-1] = 0, where W = p^T p off the diagonal: elimination that only adds."""
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
        self.mixes_once = config.residual == "mhc-layer"
        self.ffn_residual = PlainResidual() if self.mixes_once else residual()
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, state: Tensor, scales: list[Rows], memory: Memory) -> Tensor:
        x_BTD, maps = self.attention_residual.read(state)
        x_BTD = self.attention_norm(x_BTD)
        mixed_BTD = x_BTD if self.attention_conv is None else self.attention_conv(x_BTD, scales[0], memory)
        y_BTD = self.attention(mixed_BTD, scales, memory)
        if self.mixes_once:
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
    _is_stateful = True  # a cache cannot go back, as speculative decoding asks of it
    # Too few bits for what changes little or is summed up often; everything else follows `dtype`.
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
        """`output_hidden_states`: the sum of a token's streams before each layer, and what comes out at the end."""
        if kwargs.get("position_ids") is not None:
            raise ValueError("Nash-MHC counts positions by itself, from the first token that attention_mask leaves")
        if kwargs.get("output_attentions"):
            raise ValueError("Nash-MHC weighs keys at several resolutions, and has no attention weights to put out")
        config = self.config
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if config.embed_scale == "unit":
            x_BTD = x_BTD * math.sqrt(config.width)
        B, T, _ = x_BTD.shape
        cache = None
        if past_key_values is not None:
            cache = own_cache(past_key_values, config, B, x_BTD.device)
        elif config.use_cache if use_cache is None else use_cache:
            cache = NashMhcCache(config, B, x_BTD.device)
        read_B = torch.zeros(B, dtype=torch.long, device=x_BTD.device) if cache is None else cache.read_B

        # Every sequence is moved to the left, its padding to the right, wherever that was: blocks and positions then
        # count from its first token, and nothing looks at what comes after its last.
        new_B, order_BT = torch.full_like(read_B, T), None
        if attention_mask is not None:
            real_BT = attention_mask[:, -T:].to(x_BTD.device) != 0
            new_B, order_BT = real_BT.sum(1), torch.argsort((~real_BT).byte(), dim=1, stable=True)
            x_BTD = rows_at(x_BTD, order_BT)

        columns = T + (0 if cache is None else cache.columns)
        scales = lay_out(config, read_B, new_B, T, columns)
        state = x_BTD if config.residual == "plain" else x_BTD[:, :, None].expand(-1, -1, config.streams, -1)
        summed = lambda state: state if config.residual == "plain" else state.float().sum(2).to(state.dtype)
        in_order = lambda x_BTD: x_BTD if order_BT is None else rows_at(x_BTD, order_BT.argsort(dim=1))
        shown = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = []
        for number, layer in enumerate(self.layers):
            hidden += [in_order(summed(state))] if shown else []
            state = layer(state, scales, Memory(keeps=False) if cache is None else cache.layers[number])
        x_BTD = in_order(self.norm(summed(state)))
        if cache is not None:
            cache.read_B, cache.columns = read_B + new_B, columns
        output = BaseModelOutputWithPast(
            last_hidden_state=x_BTD, past_key_values=cache, hidden_states=(*hidden, x_BTD) if shown else None
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
        return False  # `generate` then leaves it to the first forward pass to make one

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
        asked = {"use_cache": use_cache, "output_hidden_states": output_hidden_states, "return_dict": True}
        outputs = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, **asked, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits_BTV, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
