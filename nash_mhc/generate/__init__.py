"""Text from a trained model: `python -m nash_mhc.generate --checkpoint-dir DIR`, or `nash_mhc.generate.decode` from Python."""
