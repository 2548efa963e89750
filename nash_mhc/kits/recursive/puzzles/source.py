"""Puzzles as datasets: made ones by name (sudoku4, sudoku9, maze, maze21x21), and CSV files of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nash_mhc.config.fields import ConfigError, Settings
from nash_mhc.data.pack import RowSource
from nash_mhc.data.sources import DataSource, Opening
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.kits.recursive.puzzles.csv_file import CsvRows, is_puzzle_file, kind_of_file
from nash_mhc.kits.recursive.puzzles.kinds import Kind, find_kind, is_puzzle
from nash_mhc.kits.recursive.puzzles.rows import PuzzleRows


def tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer of the cells of puzzles that are named so."""
    return find_kind(name).tokenizer() if is_puzzle(name) else None


def _settings(kind: Kind, values: Mapping[str, Any]) -> Settings:
    """A row is a grid, and the symbols of its cells are the tokens."""
    dataset = values["data.dataset"]
    if values["objective.name"] == "next_token":
        raise ConfigError(
            f"--dataset {dataset}: is a puzzle, which is solved and not continued; add --model-kind recursive --model-size "
            "sudoku4 (or sudoku9), which bring --objective puzzle"
        )
    found = {"data.seq_len": kind.size, "data.tokenizer": kind.tokens}
    return {path: (value, f"puzzles {dataset}") for path, value in found.items()}


def _open_made(asked: Opening) -> RowSource:
    cfg = asked.cfg
    if cfg.dataset_name is not None:
        raise ConfigError(f"--dataset-name {cfg.dataset_name}: puzzles have no variants; leave it out")
    return PuzzleRows(cfg.dataset, seed=asked.seed, split=asked.split, cache_dir=cfg.cache_dir)


def _open_file(asked: Opening) -> RowSource:
    cfg, share = asked.cfg, asked.cfg.validation_fraction
    return CsvRows(cfg.dataset, seed=asked.seed, split=asked.split, validation_fraction=share, cache_dir=cfg.cache_dir)


MADE = DataSource(
    takes=lambda dataset, form: is_puzzle(dataset),
    open=_open_made,
    infers=lambda values: _settings(find_kind(values["data.dataset"]), values),
    has_test=False,
)
FILES = DataSource(
    takes=is_puzzle_file,
    open=_open_file,
    infers=lambda values: _settings(kind_of_file(values["data.dataset"]), values),
)
