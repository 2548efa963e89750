"""Learning from a teacher: its choices, cached once."""
