"""Small trees to save, savers that do not wait long, and damage."""

import contextlib
import resource
import time

import jax
import jax.numpy as jnp

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.saving import Saver


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def data_file(checkpoint):
    return max((checkpoint / "state").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())


def tree(value):
    """Larger than LIMIT, and not to be compressed."""
    return {"a": jax.random.normal(jax.random.key(value), (64, 1024)), "b": jnp.asarray(value, jnp.int32)}


LIKE = jax.eval_shape(lambda: tree(0))


def saver_of(store, **options):
    options = {"attempts": 5, "first_pause": 0.05, "longest_pause": 0.1} | options
    files = {"run.json": "{}\n", "parameters.txt": "a 3\n"}
    RunFolder(store.folder.parent).write(files)
    return Saver(store, files, **options)


def until_due(saver):
    """As the loop asks, after each step."""
    while not saver.retry_due():
        time.sleep(0.01)


LIMIT = 40_000  # bytes a file may have while a fault lasts: less than the arrays, more than what a test prints


@contextlib.contextmanager
def full_disk():
    """No file may grow: EFBIG, from the operating system, for whoever writes, in any thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
