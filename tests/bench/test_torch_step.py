"""`bench step --against torch`: the other side is the same model, and really trains."""

import dataclasses
import itertools

import jax
import pytest
import small

from nash_mhc.bench import step
from nash_mhc.config import ConfigError
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.lora import adapters_of
from nash_mhc.train.state import abstract_state


def torch_device():
    return pytest.importorskip("torch").device("cpu")


def test_torch_trains_the_same_model_on_as_many_tokens():
    """As many parameters of each kind as ours, adapters among them; and it really trains."""
    pytest.importorskip("peft", reason="compares with PEFT, which needs torch: pip install 'torch<2.14' peft")
    sized = lambda cfg: dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=384))  # whole tiles
    for cfg in (sized(small.config()), sized(small.config(lora__rank=4, lora__targets="attention"))):
        run = step.TorchRun(cfg)
        model = run.model(torch_device())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        adapters = sum(array.size for array in jax.tree.leaves(adapters_of(abstract_state(cfg).model)))
        assert trained == (adapters or count_parameters(cfg.model))
        losses = [float(loss) for loss in itertools.islice(run.train(model, torch_device()), 4)]
        assert losses[-1] < losses[0]


def test_a_model_that_torch_has_not_is_refused():
    with pytest.raises(ConfigError, match=r"^--against torch: transformers lacks this model"):
        step.against_torch(dataclasses.replace(small.config(), model=small.NASH), steps=1, warmup=1)
    with pytest.raises(ConfigError, match=r"^--against torch: .*--lora-targets q_porj"):
        step.against_torch(small.config(lora__rank=4, lora__targets="q_porj"), steps=1, warmup=1)
