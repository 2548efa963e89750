"""Training with weights of few bits: on any mesh, resumed, and with the very numbers that are used afterwards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, untrained_run
from safetensors.numpy import load_file

from nash_mhc.config.schema import ConfigError, LoraConfig, QuantizeConfig
from nash_mhc.data.tokenizer import ByteTokenizer
from nash_mhc.hub import stored
from nash_mhc.hub.load import Loaded, load, load_few_bits
from nash_mhc.hub.packed import is_packed, write_packed
from nash_mhc.model import quantized as quantizing
from nash_mhc.model.lm import LM
from nash_mhc.model.lora import adapted, adapters_of
from nash_mhc.model.quantized import Quantized, baked, is_quantized, quantized
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import for_compute, placed
from nash_mhc.train.state import abstract_state

# A program grows with the levels, and so four bits, 16 of them, are in one of these only.
FORMS = {
    "groups": QuantizeConfig(weights="2/0,4/0", group=8),
    "rank": QuantizeConfig(weights="2/4,3/2", group=8),
    "magnitudes, table": QuantizeConfig(weights="2/4,3/2", group=8, magnitudes=True, levels="table", rest=0.05),
}


@pytest.fixture(scope="module")
def plain():
    cfg = small.config().model
    return jax.jit(lambda: LM.init(cfg, key=jax.random.key(0)))()


@pytest.fixture(scope="module", params=FORMS)
def few(request, plain):
    return jax.jit(lambda model: quantized(model, FORMS[request.param]))(plain)


forward = jax.jit(lambda model, tokens_BT: model(tokens_BT))


def snapped(model):
    """With every weight on its level: it computes what it did, and nothing is left between the levels."""
    put = lambda x: dataclasses.replace(x, base=baked(x)) if is_quantized(x) else x
    return jax.tree.map(put, model, is_leaf=is_quantized)


def weights_of(model):
    return [x for x in jax.tree.leaves(model, is_leaf=is_quantized) if is_quantized(x)]


def test_each_projection_has_few_levels_and_nothing_else_has(few, plain):
    made = named_leaves(jax.jit(baked)(few))
    assert set(made) == set(named_leaves(plain))
    changed = {name for name, leaf in named_leaves(plain).items() if (np.asarray(leaf) != np.asarray(made[name])).any()}
    ends = {"q_DNH", "k_DKH", "v_DKH", "out_NHD", "gate_DF", "up_DF", "down_FD"}
    assert {name.rpartition(".")[2] for name in changed} == ends
    assert len(weights_of(few)) == len(ends)
    for weight in weights_of(few):
        codes, levels, *_ = jax.jit(Quantized.exported)(weight)
        assert codes.min() >= 0 and codes.max() < 2**weight.bits == levels.shape[1]


def test_the_baked_model_and_the_snapped_one_compute_the_same_bit_for_bit(few):
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    want = forward(few, tokens_BT)
    np.testing.assert_array_equal(forward(jax.jit(baked)(few), tokens_BT), want)
    # Samples and prompts make the weights of all layers once, before the first token.
    np.testing.assert_array_equal(forward(jax.jit(lambda model: for_compute(model, jnp.float32))(few), tokens_BT), want)
    once = jax.jit(snapped)(few)
    np.testing.assert_array_equal(forward(once, tokens_BT), want)
    for a, b in zip(jax.tree.leaves(jax.jit(snapped)(once)), jax.tree.leaves(once), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_part_of_every_layer_has_a_gradient(few):
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    # Fresh models of several streams mix them alike, so that some gradients are zero: these are not the weights'.
    grads = jax.jit(jax.grad(lambda model: jnp.mean(jax.nn.log_softmax(model(tokens_BT)) ** 2)))(few)
    for weight in weights_of(grads):
        for name, leaf in named_leaves(weight).items():
            if name in ("seen_R", "rests_R"):  # looked at, not trained
                continue
            largest = np.abs(np.asarray(leaf)).reshape(leaf.shape[0], -1).max(axis=1)
            assert (largest > 0).all() and np.isfinite(largest).all(), name


@pytest.mark.parametrize("text", ["2/32", "5/8,4/8", "2/32,none/2", "q2a3", "none,none"])
def test_what_is_no_such_thing_is_refused(text):
    with pytest.raises(ConfigError, match="--quantize"):
        QuantizeConfig(weights=text)


def test_presets_and_pairs_say_the_same():
    assert QuantizeConfig(weights="q2a4").mlp == QuantizeConfig(weights="2/32,4/8").mlp == (2, 32)
    assert QuantizeConfig(weights="q2a4").attention == (4, 8)
    assert QuantizeConfig(weights="none,4/0").mlp is None


CONFIG = dataclasses.replace(small.config(), quantize=QuantizeConfig(weights="2/4,2/0", group=4, levels="table"))


def steps(cfg, count=3):
    return [small.random_rows(cfg, seed) for seed in range(count)]


@pytest.fixture(scope="module")
def one_device():
    return small.train(CONFIG, steps(CONFIG))


def test_a_mesh_trains_them_as_one_device_does(one_device):
    state, history, _ = one_device
    sharded, on_mesh, _ = small.train(small.mesh_config(CONFIG, 2, 2, 2), steps(CONFIG))
    np.testing.assert_allclose([m["loss"] for m in on_mesh], [m["loss"] for m in history], rtol=2e-5)
    moved = 0
    for (name, a), b in zip(named_leaves(state.model).items(), jax.tree.leaves(sharded.model), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-4, err_msg=name)
        moved += "scale" in name
    assert moved


def is_scale(name):
    return name.rpartition(".")[2] in ("scale", "scale_a", "scale_b", "steps_K")


# One with pairs of narrow matrices, the other with groups: which leaves are whose is asked of both together.
@pytest.mark.parametrize(("trains", "weights"), [("weights", "2/4,none"), ("scales", "none,2/0")])
def test_only_what_is_named_is_trained(trains, weights):
    cfg = dataclasses.replace(CONFIG, quantize=dataclasses.replace(CONFIG.quantize, trains=trains))
    names = named_leaves(Training.of(cfg).split(abstract_state(cfg).model)[0])
    assert set(names) == {name for name in named_leaves(abstract_state(cfg).model) if is_scale(name) == (trains == "scales")}
    cfg = dataclasses.replace(cfg, quantize=dataclasses.replace(cfg.quantize, weights=weights))
    before = small.start(cfg, small.make_mesh(cfg.mesh))
    before = {name: np.asarray(leaf) for name, leaf in named_leaves(before.model).items()}
    state, _, _ = small.train(cfg, steps(cfg, 2))
    changed = {name for name, leaf in named_leaves(state.model).items() if (leaf != before[name]).any()}
    assert changed == {name for name in before if is_scale(name) == (trains == "scales")}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if np.ndim(leaf) > 0]
    assert len(moments) == 2 * len(changed)


def test_a_packed_model_has_the_very_numbers_of_training(few, tmp_path):
    cfg = dataclasses.replace(small.config(), quantize=FORMS["groups"])
    loaded = Loaded(cfg, ByteTokenizer(), few, 7, "float32", ())
    sizes = {size.name: size for size in write_packed(loaded, tmp_path / "packed")}
    assert is_packed(str(tmp_path / "packed"))
    read = load(tmp_path / "packed")
    for (name, a), b in zip(named_leaves(jax.jit(baked)(few)).items(), jax.tree.leaves(read.model), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    two = sizes["2 bits"]
    codes = sum(
        array.nbytes for name, array in load_file(tmp_path / "packed" / "packed.safetensors").items() if "codes" in name
    )
    assert two.numbers // 4 <= two.bytes and codes < sum(size.numbers for size in sizes.values()) / 2
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    np.testing.assert_array_equal(forward(read.model, tokens_BT), forward(few, tokens_BT))


@pytest.fixture(scope="module")
def quantized_run(tmp_path_factory):
    return at(tmp_path_factory.mktemp("quantized") / "few", with_bits("2/4,2/0"), evaluated=False)


def test_what_corrects_a_quantized_run_is_packed_with_its_codes(quantized_run, tmp_path):
    train = dataclasses.replace(RUN.train, init_from=str(quantized_run.folder), total_steps=2)
    cfg = dataclasses.replace(RUN, lora=LoraConfig(rank=2, targets="mlp,q_proj"), train=train)
    run = at(tmp_path / "corrected", cfg, evaluated=False)
    sizes = {size.name: size for size in write_packed(load_few_bits(str(run.folder)), tmp_path / "packed")}
    assert sizes["2 bits"].bytes < sizes["2 bits"].numbers and sizes["adapters"].numbers > 0
    read = load(tmp_path / "packed")
    for (name, a), b in zip(named_leaves(load(run.folder).model).items(), jax.tree.leaves(read.model), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    np.testing.assert_array_equal(forward(read.model, tokens_BT), forward(run.state.model, tokens_BT))
    with pytest.raises(ConfigError, match="was not trained with --quantize"):
        load_few_bits(str(untrained_run(tmp_path / "plain", with_bits(None))))


def test_magnitudes_that_have_come_to_rest_stay(plain, monkeypatch):
    monkeypatch.setattr(quantizing, "_LOOK_EVERY", 2)
    form = QuantizeConfig(weights="2/4,none", group=8, magnitudes=True, rest=0.05)
    model = jax.jit(lambda model: quantized(model, form))(plain)
    (weight, *_) = weights_of(model)
    grow = jnp.asarray([1.0, 1.01, 1.2, 1.0])  # a step: the third does not rest
    looked, look = [], jax.jit(quantizing.look_at_magnitudes)
    for step in range(1, 7):
        weight = dataclasses.replace(weight, magnitude_R=weight.magnitude_R * grow[None])
        weight = look(weight, jnp.asarray(step), jnp.asarray(True))
        looked.append(np.asarray(weight.magnitudes_R))
    assert (np.asarray(weight.rests_R)[:, 2] == 0).all() and (np.asarray(weight.rests_R)[:, [0, 1, 3]] >= 2).all()
    for column in (0, 1, 3):
        np.testing.assert_array_equal(looked[-1][:, column], looked[3][:, column])
        np.testing.assert_array_equal(looked[-1][:, column], looked[-1][:, column].astype(np.float16))
    assert (looked[-1][:, 2] > 1.3 * looked[3][:, 2]).all()
    grads = jax.jit(jax.grad(lambda w: jnp.sum(w.array() ** 2)))(weight)
    assert (np.asarray(grads.magnitude_R)[:, [0, 1, 3]] == 0).all() and (np.asarray(grads.magnitude_R)[:, 2] != 0).all()
    skipped = look(weight, jnp.asarray(8), jnp.asarray(False))  # a step that changed nothing
    assert_equal_states(skipped, weight)
    (trained, *_) = weights_of(Training().split(model)[0])
    assert trained.seen_R is None and trained.rests_R is None and trained.magnitude_R is not None


def test_a_damaged_packed_folder_is_one_line(few, tmp_path):
    cfg = dataclasses.replace(small.config(), quantize=FORMS["groups"])
    write_packed(Loaded(cfg, ByteTokenizer(), few, 7, "float32", ()), tmp_path / "packed")
    weights = tmp_path / "packed" / "packed.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(ConfigError, match=r"packed\.safetensors: cannot be read"):
        load(tmp_path / "packed")
    (tmp_path / "packed" / "packed.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"packed\.json: cannot be read .* pack it again"):
        load(tmp_path / "packed")


@pytest.mark.parametrize("few", ["rank"], indirect=True)  # baked, they are all the same kind of arrays
def test_a_recovering_adapter_learns_through_the_quantized_base_from_the_first_layer_on(few):
    """The base is frozen, and what comes back through it reaches the adapters of layer 0."""
    model = jax.jit(lambda few: adapted(baked(few), LoraConfig(rank=2), jax.random.key(1)))(few)
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    loss = lambda model: jnp.mean(jax.nn.log_softmax(model(tokens_BT)) ** 2)
    grads = jax.jit(jax.grad(loss))(model)
    for name, leaf in named_leaves(adapters_of(grads)).items():
        if name.endswith("lora_b"):  # A has none while B is zero
            assert float(jnp.abs(leaf[0]).max()) > 0, name


def test_a_run_begins_with_quantized_weights_as_they_are_or_fits_them_anew(quantized_run):
    """With the same bits and ranks, bit for bit; with other ones, from what was computed with."""
    first = quantized_run
    cfg = dataclasses.replace(RUN.train, init_from=str(first.folder), total_steps=1)
    kept = stored.read(
        stored.find("--init-from", str(first.folder), None, hashed=False, say=print),
        abstract_state(dataclasses.replace(with_bits("2/4,2/0"), train=cfg)).model, lambda x: placed(x, MESH), print,
    )  # fmt: skip
    assert_equal_states(kept, first.state.model)
    for other in ("2/8,2/0", "2/4,3/0", None):
        plain = stored.read(
            stored.find("--init-from", str(first.folder), None, hashed=False, say=print),
            abstract_state(dataclasses.replace(with_bits(other), train=cfg)).model, lambda x: placed(x, MESH), print,
        )  # fmt: skip
        assert_equal_states(plain, jax.jit(baked)(first.state.model))


def with_bits(weights):
    return dataclasses.replace(
        RUN, quantize=QuantizeConfig(weights=weights, group=4), train=dataclasses.replace(RUN.train, total_steps=2)
    )


MESH = make_mesh(RUN.mesh)
