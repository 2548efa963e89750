"""lm-evaluation-harness: suppress its output and side effects."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

SEEN = ("0.4.13",)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Run lm-eval without progress bars, log lines, prints and its slow description of the machine.

    Also keeps it from forking for bootstrap resampling, which is unsafe with JAX's threads. Works without the names
    that it replaces.
    """
    from lm_eval import evaluator
    from tqdm.std import tqdm  # reads TQDM_DISABLE only when it is imported

    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    forks, bar = os.environ.get("DISABLE_MULTIPROC"), tqdm.__init__
    replaced = {name: getattr(evaluator, name) for name in ("add_env_info", "get_git_commit_hash") if hasattr(evaluator, name)}

    def no_bar(self: Any, *args: Any, **options: Any) -> None:
        bar(self, *args, **options | {"disable": True})

    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    tqdm.__init__ = no_bar
    for name in replaced:
        setattr(evaluator, name, lambda *_: None)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.__init__ = bar
        for name, function in replaced.items():
            setattr(evaluator, name, function)
        logger.setLevel(level)
        if forks is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = forks
