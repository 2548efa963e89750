"""Training with quantized weights on a mesh and resumed; packed files have the same numbers as training."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, untrained_run
from safetensors.numpy import load_file
from sampled import long

from nash_mhc.config.schema import ConfigError, LoraConfig
from nash_mhc.data.tokenizer import ByteTokenizer
from nash_mhc.kits.quantize import weights as quantizing
from nash_mhc.kits.quantize.packed import FORMAT, load_quantized, write_packed
from nash_mhc.kits.quantize.settings import QuantizeConfig
from nash_mhc.kits.quantize.weights import Quantized, is_quantized, quantized
from nash_mhc.loading.formats import format_of
from nash_mhc.loading.load import Loaded, load
from nash_mhc.loading.weights import find_record, read_record
from nash_mhc.model.lora import adapted
from nash_mhc.model.weights import materialized
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import for_compute, with_shardings
from nash_mhc.train.device_batches import to_device
from nash_mhc.train.state import ProgramKey, abstract_state, initial_state, state_shardings
from nash_mhc.train.step import compile_train_step

# Each has groups in one part and low-rank scales in the other, which take seconds to compile. The trained form has the
# fewest levels, since programs grow with them.
FORMS = {
    "uniform": QuantizeConfig(weights="3/4,4/0", group=8),
    "magnitudes, table": QuantizeConfig(weights="2/0,2/4", group=8, magnitudes=True, levels="table", rest=0.05),
}
# Not unrolled, like a run on this machine, so that runs and tests share a compiled step.
TRAINED = "magnitudes, table"
CONFIG = small.config(train__unroll="no").with_section(FORMS[TRAINED])


@pytest.fixture(scope="module")
def plain():
    return small.generic_model(CONFIG.model)


@pytest.fixture(scope="module")
def fitted(plain):
    """Return a function from a form to the fitted model, which all tests share."""
    return functools.cache(lambda form: jax.jit(lambda model: quantized(model, FORMS[form]))(plain))


@pytest.fixture(params=[TRAINED, *long(*(form for form in FORMS if form != TRAINED))])
def few(request, fitted):
    return fitted(request.param)


forward = jax.jit(lambda model, tokens_BT: model(tokens_BT))


def snapped(model):
    """Return the model with every trained array rounded to its levels."""
    put = lambda x: dataclasses.replace(x, base=materialized(x)) if is_quantized(x) else x
    return jax.tree.map(put, model, is_leaf=is_quantized)


def weights_of(model):
    return [x for x in jax.tree.leaves(model, is_leaf=is_quantized) if is_quantized(x)]


def test_projections_and_nothing_else_are_quantized(few, plain):
    made = named_leaves(jax.jit(materialized)(few))
    assert set(made) == set(named_leaves(plain))
    changed = {name for name, leaf in named_leaves(plain).items() if (np.asarray(leaf) != np.asarray(made[name])).any()}
    ends = {"q_DNH", "k_DKH", "v_DKH", "out_NHD", "gate_DF", "up_DF", "down_FD"}
    assert {name.rpartition(".")[2] for name in changed} == ends
    assert len(weights_of(few)) == len(ends)
    for weight in weights_of(few):
        codes, levels, *_ = jax.jit(Quantized.exported)(weight)
        assert codes.min() >= 0 and codes.max() < 2**weight.bits == levels.shape[1]


def test_the_plain_and_the_rounded_model_compute_the_same_bit_for_bit(few):
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    want = forward(few, tokens_BT)
    np.testing.assert_array_equal(forward(jax.jit(materialized)(few), tokens_BT), want)
    # Decoding materializes the weights of all layers once, before the first token.
    np.testing.assert_array_equal(forward(jax.jit(lambda model: for_compute(model, jnp.float32))(few), tokens_BT), want)
    once = jax.jit(snapped)(few)
    np.testing.assert_array_equal(forward(once, tokens_BT), want)
    for a, b in zip(jax.tree.leaves(jax.jit(snapped)(once)), jax.tree.leaves(once), strict=True):
        np.testing.assert_array_equal(a, b)


def gradients(fitted, form, one_device):
    if form == TRAINED:
        return one_device[0].opt_state[1].mu  # moments of three steps, which other tests compile
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    return jax.jit(jax.grad(lambda model: jnp.mean(jax.nn.log_softmax(model(tokens_BT)) ** 2)))(fitted(form))


@pytest.mark.parametrize("form", [TRAINED, *long(*(form for form in FORMS if form != TRAINED))])
def test_every_part_of_every_layer_has_a_gradient(fitted, form, one_device):
    grads = weights_of(gradients(fitted, form, one_device))
    assert len(grads) == 7
    for weight in grads:
        for name, leaf in named_leaves(weight).items():
            if name in ("seen_R", "rests_R"):  # not trained
                continue
            largest = np.abs(np.asarray(leaf)).reshape(leaf.shape[0], -1).max(axis=1)
            assert (largest > 0).all() and np.isfinite(largest).all(), name


@pytest.mark.parametrize("text", ["2/32", "5/8,4/8", "2/32,none/2", "q2a3", "none,none"])
def test_a_malformed_quantize_flag_is_refused(text):
    with pytest.raises(ConfigError, match="--quantize"):
        QuantizeConfig(weights=text)


def test_presets_are_names_of_bits_and_ranks():
    assert QuantizeConfig(weights="q2a4").parts == QuantizeConfig(weights="2/32,4/8").parts
    assert QuantizeConfig(weights="q2a4").parts == {"mlp": (2, 32), "attention": (4, 8)}
    assert QuantizeConfig(weights="none,4/0").parts["mlp"] is None


def begun(cfg, model, mesh):
    """Return the state before the first step of a fitted model; fitting it again would take seconds."""
    state = jax.jit(lambda model: initial_state(ProgramKey.of(cfg), model))(model)
    return jax.tree.map(lambda a, s: jax.device_put(np.asarray(a), s), state, state_shardings(ProgramKey.of(cfg), mesh))


def trained_model(cfg, model, count=3):
    """Return the last state and the losses."""
    mesh = make_mesh(cfg.mesh)
    state, step, losses = begun(cfg, model, mesh), compile_train_step(cfg, mesh), []
    for seed in range(count):
        state, metrics = step(state, to_device(small.random_rows(cfg, seed), mesh))
        losses.append(float(metrics["loss"]))
    return jax.device_get(state), losses


@pytest.fixture(scope="module")
def one_device(fitted):
    return trained_model(CONFIG, fitted(TRAINED))


@pytest.mark.long
def test_a_mesh_trains_quantized_weights_as_one_device_does(fitted, one_device):
    """With group scales, low-rank scales with magnitudes, and a trained table."""
    (state, losses), model = one_device, fitted(TRAINED)
    sharded, on_mesh = trained_model(small.mesh_config(CONFIG, 2, 2, 2), model)
    np.testing.assert_allclose(on_mesh, losses, rtol=2e-5)
    moved, before = set(), named_leaves(model)
    for (name, a), b in zip(named_leaves(state.model).items(), jax.tree.leaves(sharded.model), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-4, err_msg=name)
        moved |= {name.rpartition(".")[2]} if (a != np.asarray(before[name])).any() else set()
    assert moved >= {"base", *SCALES}


SCALES = ("scale", "scale_a", "scale_b", "magnitude_R", "steps_K")


def is_watched(name):
    return name.rpartition(".")[2] in ("seen_R", "rests_R")


def is_scale(name):
    return name.rpartition(".")[2] in SCALES


# One with low-rank scales, the other with groups; the names are checked for both together.
@pytest.mark.parametrize(
    ("trains", "weights"), [pytest.param("weights", "none,2/4", marks=pytest.mark.long), ("scales", "2/0,none")]
)
def test_quantize_trains_selects_weights_or_scales(fitted, trains, weights):
    section = dataclasses.replace(FORMS[TRAINED], trains=trains)
    cfg = CONFIG.with_section(section)
    names = named_leaves(Training.of(cfg).split(abstract_state(cfg).model)[0])
    asked = lambda names: {name for name in names if is_scale(name) == (trains == "scales") and not is_watched(name)}
    assert set(names) == asked(named_leaves(abstract_state(cfg).model))
    cfg = cfg.with_section(dataclasses.replace(section, weights=weights))
    if trains == "weights":  # the fitted model, with plain MLP weights
        of_ffn = lambda path: ".ffn." in jax.tree_util.keystr(path)
        given = jax.tree_util.tree_map_with_path(
            lambda path, x: x.base if is_quantized(x) and of_ffn(path) else x, fitted(TRAINED), is_leaf=is_quantized
        )
    else:  # fitted by a fresh run; groups are fast
        given = small.start(cfg, make_mesh(cfg.mesh)).model
    before = {name: np.asarray(leaf) for name, leaf in named_leaves(given).items()}
    state, _ = trained_model(cfg, given, 2)
    changed = {name for name, leaf in named_leaves(state.model).items() if (leaf != before[name]).any()}
    assert changed == asked(before)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if np.ndim(leaf) > 0]
    assert len(moments) == 2 * len(changed)


def test_a_packed_model_has_the_weights_of_training_bit_for_bit(few, tmp_path):
    loaded = Loaded(CONFIG, ByteTokenizer(), few, 7, "float32", ())
    sizes = {size.name: size for size in write_packed(loaded, tmp_path / "packed")}
    assert format_of(tmp_path / "packed") is FORMAT
    read = load(tmp_path / "packed")
    for (name, a), b in zip(named_leaves(jax.jit(materialized)(few)).items(), jax.tree.leaves(read.model), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    bits, size = min((int(name.split()[0]), size) for name, size in sizes.items() if name.endswith(" bits"))
    codes = sum(
        array.nbytes for name, array in load_file(tmp_path / "packed" / "packed.safetensors").items() if "codes" in name
    )
    assert size.numbers * bits // 8 <= size.bytes and codes < sum(size.numbers for size in sizes.values()) / 2
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    np.testing.assert_array_equal(forward(read.model, tokens_BT), forward(few, tokens_BT))
    large = eqx.tree_at(lambda model: model.embed_VD, few, replace_fn=lambda a: a.at[0, 0].set(-70000.0))
    with pytest.raises(ConfigError, match=r"embed_VD.* 70000,.*float32"):
        write_packed(dataclasses.replace(loaded, model=large), tmp_path / "narrow", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.fixture(scope="module")
def quantized_run(fitted, tmp_path_factory):
    """A run that starts from the fitted model; it shares its compiled step with the tests above."""
    folder, cfg = tmp_path_factory.mktemp("quantized"), with_bits(FORMS[TRAINED].weights)
    untrained_run(folder / "fitted", cfg, fitted(TRAINED))
    return at(folder / "few", cfg, evaluated=False, init_from=str(folder / "fitted"))


def test_lora_on_a_quantized_run_is_packed_with_its_codes(quantized_run, plain, tmp_path):
    train = dataclasses.replace(RUN.train, init_from=str(quantized_run.folder), total_steps=2)
    cfg = dataclasses.replace(RUN, lora=LoraConfig(rank=2, targets="down_proj,q_proj"), train=train)
    run = at(tmp_path / "corrected", cfg, evaluated=False)
    sizes = {size.name: size for size in write_packed(load_quantized(str(run.folder)), tmp_path / "packed")}
    assert sizes["2 bits"].bytes < sizes["2 bits"].numbers and sizes["adapters"].numbers > 0
    read = load(tmp_path / "packed")
    for (name, a), b in zip(named_leaves(load(run.folder).model).items(), jax.tree.leaves(read.model), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    np.testing.assert_array_equal(forward(read.model, tokens_BT), forward(run.state.model, tokens_BT))
    with pytest.raises(ConfigError, match="was not trained with --quantize"):
        load_quantized(str(untrained_run(tmp_path / "plain", with_bits(None), plain)))


def test_magnitudes_at_rest_are_frozen(fitted, monkeypatch):
    monkeypatch.setattr(quantizing, "_CHECK_INTERVAL", 2)
    model = fitted(TRAINED)
    weight = model.layers.attention.q_DNH
    grow = jnp.asarray([1.0, 1.01, 1.2, 1.0])  # per step: the third keeps moving
    looked, look = [], jax.jit(lambda w, step, changed: w.after_update(step, changed, {}))
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
    skipped = look(weight, jnp.asarray(8), jnp.asarray(False))  # a skipped step
    assert_equal_states(skipped, weight)
    split = Training().split(model)[0].layers.attention.q_DNH
    assert split.seen_R is None and split.rests_R is None and split.magnitude_R is not None


def test_a_damaged_packed_folder_is_one_line(fitted, tmp_path):
    write_packed(Loaded(CONFIG, ByteTokenizer(), fitted(TRAINED), 7, "float32", ()), tmp_path / "packed")
    weights = tmp_path / "packed" / "packed.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(ConfigError, match=r"packed\.safetensors: cannot be read"):
        load(tmp_path / "packed")
    (tmp_path / "packed" / "packed.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"packed\.json: cannot be read .* pack it again"):
        load(tmp_path / "packed")


@pytest.mark.parametrize("few", [TRAINED], indirect=True)  # the plain arrays of all forms are alike
def test_adapters_of_all_layers_get_gradients_through_a_quantized_base(few):
    """Also those of layer 0, although the base is frozen."""
    model = jax.jit(lambda few: adapted(materialized(few), LoraConfig(rank=2), jax.random.key(1)))(few)
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    loss = lambda model: jnp.mean(jax.nn.log_softmax(model(tokens_BT)) ** 2)
    trained, base = Training(adapters=True).split(model)
    grads = named_leaves(jax.jit(jax.grad(lambda trained: loss(eqx.combine(trained, base))))(trained))
    of_b = {
        name: leaf for name, leaf in grads.items() if name.endswith("lora_b")
    }  # lora_a has no gradient while lora_b is zero
    assert len(of_b) == 7
    for name, leaf in of_b.items():
        assert np.abs(np.asarray(leaf)[0]).max() > 0, name


def test_a_run_starts_from_the_same_quantized_weights_or_refits_others(quantized_run):
    """With the same bits and ranks, bit for bit; with others, from the arrays that the run computed with."""
    first = quantized_run
    cfg = dataclasses.replace(RUN.train, init_from=str(first.folder), total_steps=1)
    kept = read_record(
        find_record("--init-from", str(first.folder), None, hashed=False),
        abstract_state(dataclasses.replace(with_bits(FORMS[TRAINED].weights), train=cfg)).model,
        lambda x: with_shardings(x, MESH),
    )  # fmt: skip
    assert_equal_states(kept, first.state.model)
    for other in ("2/0,2/8", "3/0,2/4", None):
        plain = read_record(
            find_record("--init-from", str(first.folder), None, hashed=False),
            abstract_state(dataclasses.replace(with_bits(other), train=cfg)).model, lambda x: with_shardings(x, MESH),
        )  # fmt: skip
        assert_equal_states(plain, jax.jit(materialized)(first.state.model))


def with_bits(weights):
    run = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, total_steps=2))
    return run.with_section(dataclasses.replace(FORMS[TRAINED], weights=weights))


MESH = make_mesh(RUN.mesh)
