"""A model that the package knows nothing of: what comes next depends on the last token alone."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp

from nash_mhc.config.fields import key
from nash_mhc.config.schema import ARCHITECTURES, ArchitectureConfig, DivisibleSize
from nash_mhc.model import architectures
from nash_mhc.model.parts import init_matrix
from nash_mhc.model.protocol import Architecture, Execution
from nash_mhc.parallel.params import TABLE, param
from nash_mhc.parallel.sharding import constrain


@dataclass(frozen=True)
class BigramConfig(ArchitectureConfig):
    architecture = "bigram"

    vocab_size: int = key(257, "tokens in the vocabulary", low=2)
    width: int = key(32, "numbers that a token is remembered by", low=1)

    def divisible_sizes(self):
        return [*super().divisible_sizes(), DivisibleSize("embed", self.width, "--model-width")]


class Bigram(eqx.Module):
    embed_VD: jax.Array = param("vocab", "embed", role=TABLE)
    output_VD: jax.Array = param("vocab", "embed", role=TABLE)
    cfg: BigramConfig = eqx.field(static=True)

    @staticmethod
    def init(cfg, *, key):
        first, second = jax.random.split(key)
        shape = (cfg.padded_vocab, cfg.width)
        return Bigram(init_matrix(first, shape, cfg.width), init_matrix(second, shape, cfg.width), cfg)

    @property
    def unembed_VD(self):
        return self.output_VD

    def hidden(self, tokens_BT, segments_BT=None, execution=Execution()):
        x_BTD = self.embed_VD.astype(execution.dtype)[tokens_BT]
        return constrain(x_BTD, "batch", "time_split", "width"), x_BTD

    def health(self, report):
        return {"rms": jnp.sqrt(jnp.mean(jax.lax.stop_gradient(report) ** 2))}

    def auxiliary_losses(self, report):
        return {}


def decode(model, cache, tokens_B):
    """It remembers nothing: its cache counts."""
    x_BD = model.embed_VD[tokens_B]
    return (x_BD @ model.output_VD.T)[:, : model.cfg.vocab_size].astype(jnp.float32), cache + 1


BIGRAM = Architecture(
    init=Bigram.init,
    flops_per_token=lambda cfg, seq_len: 6.0 * cfg.vocab_size * cfg.width,
    empty_cache=lambda cfg, batch, seq_len, dtype: jnp.zeros((), jnp.int32),
    decode=decode,
)


def register():
    ARCHITECTURES["bigram"] = BigramConfig
    architectures.register(BigramConfig, BIGRAM)
