"""Sequence mixers, one file each. `register_mixer` (model/layer.py) adds one from outside of the package."""
