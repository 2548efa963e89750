"""pip: its default package index."""

from __future__ import annotations

from nash_mhc.config.schema import ConfigError

SEEN = ("23.2.1",)


def default_index() -> str:
    """Return the address of the default index; raise ConfigError without pip's private name."""
    try:
        from pip._internal.models.index import PyPI

        return PyPI.simple_url
    except (ImportError, AttributeError) as error:
        raise ConfigError("cannot find pip's default index; set PIP_INDEX_URL") from error
