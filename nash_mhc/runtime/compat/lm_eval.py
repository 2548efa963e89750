"""lm-evaluation-harness: what it prints and does besides evaluating."""

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
    """Run lm-eval without progress bars, log lines and prints, and without the seconds that it describes this machine.

    It forks no processes to resample either: a process with JAX's threads may not survive that. Names that it no longer
    has are passed over.
    """
    from lm_eval import evaluator
    from tqdm.std import tqdm  # which reads TQDM_DISABLE when it is imported, and never again

    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    forks, bar = os.environ.get("DISABLE_MULTIPROC"), tqdm.__init__
    asked = {name: getattr(evaluator, name) for name in ("add_env_info", "get_git_commit_hash") if hasattr(evaluator, name)}

    def no_bar(self: Any, *args: Any, **options: Any) -> None:
        bar(self, *args, **options | {"disable": True})

    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    tqdm.__init__ = no_bar
    for name in asked:
        setattr(evaluator, name, lambda *_: None)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.__init__ = bar
        for name, function in asked.items():
            setattr(evaluator, name, function)
        logger.setLevel(level)
        if forks is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = forks
