"""absl: its flags, which grain's worker processes read."""

from __future__ import annotations

SEEN = ("2.5.1",)  # of absl-py


def mark_flags_as_parsed() -> None:
    """Let grain's workers read absl's flags, which only an absl program parses. Without the name, grain says so."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
