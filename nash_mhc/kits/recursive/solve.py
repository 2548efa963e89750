"""A grid of the user's, solved by a model that was trained on puzzles, and checked by the rules."""

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
from nash_mhc.kits.recursive.puzzles.cells import CellTokenizer
from nash_mhc.kits.recursive.puzzles.csv_file import kind_of_text
from nash_mhc.kits.recursive.puzzles.kinds import Kind, find_kind, is_puzzle
from nash_mhc.kits.recursive.puzzles.sudoku import is_solution
from nash_mhc.kits.recursive.puzzles.sudoku_search import solve
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.model.parts import logits_of
from nash_mhc.model.protocol import Execution

_SOLUTIONS = {0: "it has no solution", 2: "it has more than one solution, and models are trained on puzzles with one"}


class Solved(NamedTuple):
    grid: str  # in lines
    is_valid: bool
    verdict: str


def solved(loaded: Loaded, text: str) -> Solved:
    """Solve the puzzle that is written in `text`, a character a cell, in one line or several. ConfigError."""
    model, tokenizer = loaded.model, loaded.tokenizer
    if not isinstance(model, Recursive) or model.cfg.causal or not isinstance(tokenizer, CellTokenizer):
        raise ConfigError("--puzzle: this model writes text; puzzles are for runs that were trained with --objective puzzle")
    cells_N, size = tokenizer.encode("".join(text.splitlines())), loaded.config.data.seq_len
    if len(cells_N) != size:
        raise ConfigError(f"--puzzle: has {len(cells_N)} cells, and this model solves grids of {size}")
    dataset = loaded.config.data.dataset
    kind = find_kind(dataset) if is_puzzle(dataset) else kind_of_text(tokenizer.decode(cells_N))
    if kind.symmetry == "sudoku" and (count := int(solve(cells_N[None]).solutions[0])) != 1:
        raise ConfigError(f"--puzzle: {_SOLUTIONS[count]}; change its cells")
    answer_N = np.asarray(_answer(model, jnp.asarray(cells_N[None]), loaded.dtype, len(tokenizer.symbols))[0])
    wrong = mistake(kind, cells_N, answer_N)
    return Solved(tokenizer.grid_text(answer_N, kind.width), wrong is None, f"not valid: {wrong}" if wrong else "valid")


def answer(loaded: Loaded, text: str) -> str:
    """What `generate --puzzle` prints: the grid and the verdict."""
    found = solved(loaded, text)
    return f"{found.grid}\n{found.verdict}"


def _answer(model: Recursive, cells_BN: Int[Array, "B N"], dtype: str, symbols: int) -> Int[Array, "B N"]:
    """The likeliest symbol of each cell after all passes."""
    cfg: RecursiveConfig = model.cfg
    execution = Execution(dtype, "none", evaluates=True)

    @jax.jit
    def passes(model: Recursive, cells_BN: Array) -> Array:
        x_BND, layout = model.entered(cells_BN, jnp.dtype(dtype)), model.layout(cells_BN, None, execution)
        think = lambda states, _: (model.think(x_BND, states, layout, execution)[0], None)
        states, _ = lax.scan(think, model.fresh(x_BND), length=cfg.most_passes)
        logits_BNV = logits_of(model.norm(states.upper_BTD), model.unembed_VD, cfg.vocab_size)
        return jnp.argmax(logits_BNV[..., :symbols], axis=-1)

    found: Array = passes(model, cells_BN)
    return found


def mistake(kind: Kind, cells_N: np.ndarray, answer_N: np.ndarray) -> str | None:
    """What is wrong with an answer by the rules of its kind; None where nothing is."""
    empty = kind.symbols.index(" ") if " " in kind.symbols else 0
    if changed := int(((cells_N != empty) & (cells_N != answer_N)).sum()):
        return f"{changed} of the cells that were given {'is' if changed == 1 else 'are'} changed"
    if kind.symmetry == "sudoku":
        return None if is_solution(answer_N[None].astype(np.uint8))[0] else "a row, a column or a box lacks a digit"
    if "#" in kind.symbols:
        return _maze_mistake(kind.tokenizer().grid_text(answer_N, kind.width).split("\n"))
    return None


def _maze_mistake(lines: list[str]) -> str | None:
    """By breadth-first search: the marked cells alone must lead from S to G, in as few steps as there can be."""
    at = {(y, x): symbol for y, line in enumerate(lines) for x, symbol in enumerate(line)}

    def steps(through: str) -> int | None:
        edge, count = {place for place, symbol in at.items() if symbol == "S"}, 0
        seen = edge
        while edge:
            if any(at[place] == "G" for place in edge):
                return count
            near = {(y + dy, x + dx) for y, x in edge for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))}
            edge = {place for place in near if at.get(place, "#") in through} - seen
            seen, count = seen | edge, count + 1
        return None

    marked, shortest = steps("oG"), steps("o G")
    if marked is None:
        return "the marked cells do not lead from S to G"
    if marked != shortest or list(at.values()).count("o") != marked - 1:
        return f"what is marked is not the shortest way, which has {shortest} steps"
    return None
