"""`generate --puzzle`: solve a grid with a trained model, and check the answer by the rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from nash_mhc.config.schema import ConfigError
from nash_mhc.hub.load import Loaded
from nash_mhc.kits.recursive.model import Recursive
from nash_mhc.kits.recursive.puzzles import maze, sudoku
from nash_mhc.kits.recursive.puzzles.csv_file import kind_of_text
from nash_mhc.kits.recursive.puzzles.kinds import CellTokenizer, Kind, find_kind, is_puzzle
from nash_mhc.model.parts import logits_of
from nash_mhc.model.protocol import Execution

_BAD_SUDOKU = {0: "it has no solution", 2: "it has more than one solution, and models are trained on puzzles with one"}


def answer(loaded: Loaded, text: str) -> str:
    """Solve the puzzle in `text`, one character per cell, and return the grid in lines and the verdict."""
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
    verdict = f"not valid: {error}" if error else "valid"
    return f"{tokenizer.grid_text(answer_N, kind.width)}\n{verdict}"


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
    return _maze_mistake(kind, answer_N) if kind.symbols == maze.SYMBOLS else None


def _maze_mistake(kind: Kind, answer_N: np.ndarray) -> str | None:
    """Check that the marked cells alone are a shortest path."""
    marked_N = np.where(answer_N == maze.OPEN, maze.WALL, answer_N)
    steps, paths = maze.shortest_paths(marked_N[None], kind.height, kind.width)
    shortest, _ = maze.shortest_paths(answer_N[None], kind.height, kind.width)
    if not paths[0]:
        return "the marked cells do not connect S to G"
    if steps[0] != shortest[0] or (answer_N == maze.PATH).sum() != steps[0] - 1:
        return f"the marked path is not the shortest, which has {shortest[0]} steps"
    return None
