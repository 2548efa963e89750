"""Types and shapes at run time, as jaxtyping asks for them: see addopts in pyproject.toml."""

import functools

from beartype import beartype


def checked(function):
    """beartype makes its checks when the function is first called: of those that a worker imports, it calls few."""
    made = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal made
        if made is None:
            made = beartype(function)
        return made(*args, **kwargs)

    return call
