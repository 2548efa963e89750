"""Text from a trained model: `python -m nash_mhc.generate DIR`, or `nash_mhc.generate.decode` from Python."""
