"""That the suite checks the types and shapes which the package declares, where it is called and where it returns."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped
from type_checks import checked

from nash_mhc.ops.norm import rms_norm


def test_an_array_of_another_shape_is_refused_by_the_package():
    with pytest.raises(TypeCheckError, match=r"rms_norm\.\s*The problem arose whilst typechecking parameter 'scale_D'"):
        rms_norm(jnp.ones((2, 3, 4)), jnp.ones(5), 1e-6)


def test_what_comes_back_is_looked_at_every_time():
    @jaxtyped(typechecker=checked)
    def grown(x_D: Float[np.ndarray, "D"], by: int) -> Float[np.ndarray, "D"]:
        return np.resize(x_D, len(x_D) + by)

    assert len(grown(np.ones(3), 0)) == 3
    for by in (1, 2):
        with pytest.raises(TypeCheckError, match="return value"):
            grown(np.ones(3), by)
    with pytest.raises(TypeCheckError, match="by"):
        grown(np.ones(3), 0.5)
