"""Evaluations of a trained model: `python -m nash_mhc.evaluate DIR --tasks A,B`."""
