"""What the core knows of a reservoir model."""

from __future__ import annotations

from nash_mhc.kits.reservoir import activations, memory, model, ridge
from nash_mhc.model.protocol import Architecture, AttentionShape

ARCHITECTURE = Architecture(
    init=model.Reservoir.init,
    flops_per_token=model.flops_per_token,
    empty_cache=model.empty_state,
    decode=model.decode,
    attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window) if cfg.attention_every else None,
    activations=activations.activations,
    drawn=model.drawn,
    remembers=memory.as_dict,
    warm_start=ridge.warm_start,
)
