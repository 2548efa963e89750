"""`generate --puzzle`: solve a grid with a trained model, and check the answer by the rules."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from nash_mhc.config.schema import ConfigError
from nash_mhc.hub.load import Loaded
from nash_mhc.kits.recursive.model import Recursive
from nash_mhc.kits.recursive.puzzles import sudoku
from nash_mhc.kits.recursive.puzzles.csv_file import kind_of_text
from nash_mhc.kits.recursive.puzzles.kinds import CellTokenizer, Kind, find_kind, is_puzzle
from nash_mhc.model.parts import logits_of
from nash_mhc.model.protocol import Execution

_BAD_SUDOKU = {0: "it has no solution", 2: "it has more than one solution, and models are trained on puzzles with one"}


class Answer(NamedTuple):
    grid: str  # in lines
    is_valid: bool
    verdict: str


def answer(loaded: Loaded, text: str) -> str:
    """Return what `generate --puzzle` prints: the grid and the verdict."""
    found = solve(loaded, text)
    return f"{found.grid}\n{found.verdict}"


def solve(loaded: Loaded, text: str) -> Answer:
    """Solve the puzzle in `text`: one character per cell, in one or more lines. May raise ConfigError."""
    model, tokenizer = loaded.model, loaded.tokenizer
    if not isinstance(model, Recursive) or model.cfg.causal or not isinstance(tokenizer, CellTokenizer):
        raise ConfigError("--puzzle: this model writes text; use a run with --objective puzzle")
    cells_N, size = tokenizer.encode("".join(text.splitlines())), loaded.config.data.seq_len
    if len(cells_N) != size:
        raise ConfigError(f"--puzzle: has {len(cells_N)} cells, and this model solves grids of {size}")
    dataset = loaded.config.data.dataset
    kind = find_kind(dataset) if is_puzzle(dataset) else kind_of_text(tokenizer.decode(cells_N))
    if kind.symmetry == "sudoku" and (count := int(sudoku.solve(cells_N[None]).solutions[0])) != 1:
        raise ConfigError(f"--puzzle: {_BAD_SUDOKU[count]}; change its cells")
    answer_N = np.asarray(_predict(model, jnp.asarray(cells_N[None]), loaded.dtype, len(tokenizer.symbols))[0])
    error = mistake(kind, cells_N, answer_N)
    return Answer(tokenizer.grid_text(answer_N, kind.width), error is None, f"not valid: {error}" if error else "valid")


def _predict(model: Recursive, cells_BN: Int[Array, "B N"], dtype: str, symbols: int) -> Int[Array, "B N"]:
    """Return the most likely symbol of each cell after the last pass."""
    cfg = model.cfg
    execution = Execution(dtype, "none", evaluates=True)

    @jax.jit
    def run(model: Recursive, cells_BN: Array) -> Array:
        x_BND, layout = model.embed_tokens(cells_BN, jnp.dtype(dtype)), model.layout(cells_BN, None, execution)
        one_pass = lambda states, _: (model.run_pass(x_BND, states, layout, execution)[0], None)
        states, _ = lax.scan(one_pass, model.initial_states(x_BND), length=cfg.most_passes)
        logits_BNV = logits_of(model.norm(states.upper_BTD), model.unembed_VD, cfg.vocab_size)
        return jnp.argmax(logits_BNV[..., :symbols], axis=-1)

    answers_BN: Array = run(model, cells_BN)
    return answers_BN


def mistake(kind: Kind, cells_N: np.ndarray, answer_N: np.ndarray) -> str | None:
    """Return what is wrong with an answer by the rules of its kind, or None if it is valid."""
    if changed := int(((cells_N != kind.empty) & (cells_N != answer_N)).sum()):
        return f"{changed} of the given cells {'is' if changed == 1 else 'are'} changed"
    if kind.symmetry == "sudoku":
        valid = sudoku.is_solution(answer_N[None].astype(np.uint8))[0]
        return None if valid else "a row, a column or a box lacks a digit"
    if "#" in kind.symbols:
        return _maze_mistake(kind.tokenizer().grid_text(answer_N, kind.width).split("\n"))
    return None


def _maze_mistake(lines: list[str]) -> str | None:
    """Check by breadth-first search that the marked cells alone are a shortest path from S to G."""
    symbols = {(y, x): symbol for y, line in enumerate(lines) for x, symbol in enumerate(line)}

    def steps(passable: str) -> int | None:
        frontier, count = {place for place, symbol in symbols.items() if symbol == "S"}, 0
        seen = frontier
        while frontier:
            if any(symbols[place] == "G" for place in frontier):
                return count
            near = {(y + dy, x + dx) for y, x in frontier for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))}
            frontier = {place for place in near if symbols.get(place, "#") in passable} - seen
            seen, count = seen | frontier, count + 1
        return None

    marked, shortest = steps("oG"), steps("o G")
    if marked is None:
        return "the marked cells do not connect S to G"
    if marked != shortest or list(symbols.values()).count("o") != marked - 1:
        return f"the marked path is not the shortest, which has {shortest} steps"
    return None
