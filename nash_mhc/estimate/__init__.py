"""Estimate what fits a machine, and how fast it runs there, by arithmetic."""
