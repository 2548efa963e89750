"""A kit in a folder outside of the package, unloaded again after the test."""

import contextlib
import sys

from nash_mhc.config import kits


@contextlib.contextmanager
def outside_kit(folder, files, monkeypatch):
    """Write the kit's files; yield its folder."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.setenv(kits.OUTSIDE, "")
    import nash_mhc.kits as package

    monkeypatch.setattr(package, "__path__", list(package.__path__))
    yield folder
    for module in [name for name in sys.modules if name.startswith(f"nash_mhc.kits.{folder.name}")]:
        del sys.modules[module]
    vars(package).pop(folder.name, None)
    kits.clear_cache()
