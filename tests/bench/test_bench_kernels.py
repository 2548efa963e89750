"""`bench kernels` runs the kernels of a real step beside their plain forms, and says which is wrong."""

import functools
import json
import sys

import jax.numpy as jnp
import pytest

from nash_mhc.bench import __main__ as bench
from nash_mhc.bench import kernels
from nash_mhc.ops import conv

# A plain decoder with a convolution: few kernels, which the interpreter compiles in seconds.
FLAGS = (
    "--model-scales 1 --model-window none --model-residual plain --model-width 32 --model-heads 2 --model-kv-heads 2 "
    "--model-head-dim 16 --model-ffn 32 --model-vocab-size 300 --batch-size 8 --seq-len 128 --dtype bfloat16 --remat full "
    "--model-layers 1"
).split()


@pytest.mark.long
def test_every_kernel_of_a_step_meets_its_plain_form_and_a_wrong_one_is_named(monkeypatch, capsys, tmp_path):
    right, file = conv._conv_in_kernel, tmp_path / "kernels.json"
    wrong = functools.wraps(right)(lambda *args, **options: 1.02 * right(*args, **options))
    monkeypatch.setattr(conv, "_conv_in_kernel", wrong)
    monkeypatch.setattr(sys, "argv", ["bench", "kernels", *FLAGS, "--json", str(file)])
    assert bench.main() == 1
    out, figures = capsys.readouterr().out, json.loads(file.read_text())
    errors = {row["kernel"]: [e["kernel"] for e in row["errors"].values()] for row in figures["kernels"]}
    assert errors.keys() >= {
        "conv.conv", "conv.backward", "norm.norm", "norm.norm_backward", "norm.norm_rope", "norm.norm_rope_backward",
    }  # fmt: skip
    assert figures["wrong"] == ["conv.conv"] and figures["interpreted"]
    assert all(0 <= e < 1e-2 for kernel, found in errors.items() for e in found if kernel != "conv.conv")
    assert all(1e-2 < e < 4e-2 for e in errors["conv.conv"])
    assert "wrong: conv.conv" in out
    assert [line.split()[1] for line in out.splitlines() if "WRONG" in line] == ["conv.conv"]


def test_what_is_no_number_is_wrong_unless_the_plain_form_has_none_either():
    wanted = jnp.array([1.0, jnp.nan, -jnp.inf, 2.0])
    assert float(kernels._error(wanted, wanted)) == 0.0
    assert float(kernels._error(wanted, wanted.at[0].set(1.5))) == 0.25  # of the largest
    for got in (wanted.at[0].set(jnp.nan), wanted.at[1].set(0.0), wanted.at[2].set(0.0)):
        assert not kernels._Error("float32", float(kernels._error(wanted, got)), 0.0).is_equal
