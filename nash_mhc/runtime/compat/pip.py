"""pip: the index that it asks where none is configured."""

from __future__ import annotations

from nash_mhc.config.schema import ConfigError

SEEN = ("23.2.1",)


def default_index() -> str:
    """Return its address. ConfigError without the name: the user names an index."""
    try:
        from pip._internal.models.index import PyPI

        return PyPI.simple_url
    except (ImportError, AttributeError) as error:
        raise ConfigError("pip does not say which index it uses; set PIP_INDEX_URL") from error
