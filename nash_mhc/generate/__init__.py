"""Text generation: `python -m nash_mhc.generate DIR`."""
