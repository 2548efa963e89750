"""Recursive models, which apply a small net to its own state repeatedly, and puzzles for them to solve."""

from nash_mhc.config.kits import Figure, Kit

_LINE = ", solved {eval/exact:.1%} ({eval/exact_stopping:.1%} when it stops early, after {eval/passes:.1f} passes)"

KIT = Kit(
    model_kinds={"recursive": "settings:RecursiveConfig"},
    architectures={"recursive": "model:ARCHITECTURE"},
    presets={"recursive": "settings:PRESETS"},
    axes={"cells": ()},  # cells of a grid, too few to shard
    objectives={"puzzle": "objective:PUZZLE"},
    optimizers={"adam_atan2": "objective:adam_atan2"},
    sources={"sudoku4, sudoku9, maze": "puzzles.rows:GENERATED", "CSV files of puzzles": "puzzles.csv_file:FILES"},
    tokenizers={"puzzles": "puzzles.rows:tokenizer"},
    figures={
        "exact": Figure("held-out puzzles solved", "{:.1%}", "puzzles solved", line=_LINE, of_text=False),
        "exact_stopping": Figure("solved when it stops early", "{:.1%}"),
    },
    nicknames={
        "H_cycles": "outer_cycles",
        "L_cycles": "inner_cycles",
        "halt_max_steps": "most_passes",
        "halt_exploration_prob": "explore",
    },
    generators={"puzzle": "settings:PUZZLE"},
)
