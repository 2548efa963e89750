"""The end of a run: its best checkpoint, its test score, and its answers before and after training (result.json)."""

from __future__ import annotations

import json
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import EVALUATIONS, RESULT, RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.model.lora import adapters_of, base_of, on_base
from nash_mhc.parallel.board import from_leader
from nash_mhc.train.evaluate import Evaluations, Stopped
from nash_mhc.train.inputs import Inputs, Say
from nash_mhc.train.state import TrainState, sharded_abstract_state

_QUESTIONS = 3
_SHOWN = 70  # characters of a line


def record_answers(inputs: Inputs, evaluations: Evaluations, state: TrainState) -> None:
    """Record what the untrained model answers to held-out prompts, if the data has prompts and responses."""
    if inputs.evaluator is None:
        return
    questions = inputs.evaluator.questions(_QUESTIONS)
    answers = evaluations.samples.answer(state.best_model, [question.prompt for question in questions])
    if answers is None:
        return
    decode = lambda tokens: inputs.tokenizer.decode(np.asarray(tokens))
    rows = [
        {"prompt": decode(question.prompt), "response": decode(question.response), "before": answer}
        for question, answer in zip(questions, answers, strict=True)
    ]
    inputs.folder.write({RESULT: json.dumps({"answers": rows}, indent=2) + "\n"})


def finish(
    inputs: Inputs, mesh: Mesh, store: Store, evaluations: Evaluations, state: TrainState, step: int, say: Say
) -> tuple[TrainState, dict[str, float]]:
    """Return the state that the run ends with, and its score on the test split; writes result.json once per step."""
    before = from_leader(inputs.folder.result)  # all processes must do the same
    if inputs.cfg.ends_with_best and inputs.evaluator is not None:
        like = sharded_abstract_state(inputs.cfg, mesh)
        state, step = _with_best(like, store, evaluations, state, step, say, has_adapters=inputs.cfg.lora.rank > 0)
    if before.get("step") == step:
        return state, {}
    result: dict[str, Any] = {"step": step, "evaluation": _evaluation(inputs.folder, step)}
    if inputs.test is not None:
        try:
            values = evaluations.score(inputs.test, state.best_model, step)
        except Stopped:
            return state, {}
        result["test"] = {name.replace("eval/", "test/"): value for name, value in values.items()}
        told = ", ".join(f"{name.removeprefix('test/')} {value:.4f}" for name, value in result["test"].items())
        say(f"test, step {step}: {told}")
    if rows := before.get("answers", []):
        questions = inputs.evaluator.questions(_QUESTIONS) if inputs.evaluator is not None else []
        answers = evaluations.samples.answer(state.best_model, [question.prompt for question in questions]) or []
        result["answers"] = [row | {"after": answer} for row, answer in zip(rows, answers, strict=False)]
        for row in result["answers"]:
            say(f"asked: {_short(row['prompt'])}\n  right: {_short(row['response'])}")
            say(f"  before: {_short(row['before'])}\n  now: {_short(row['after'])}")
    if jax.process_index() == 0 and len(result) > 2:
        inputs.folder.write({RESULT: json.dumps(result, indent=2) + "\n"})
    return state, result.get("test", {})


def _short(text: str) -> str:
    line = " ".join(text.split()) or "(nothing)"
    # The end of it, where a question is asked.
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN // 4]} ... {line[5 + _SHOWN // 4 - _SHOWN :]}"


def _evaluation(folder: RunFolder, step: int) -> dict[str, Any]:
    rows = [row for row in folder.rows(EVALUATIONS) if row["step"] == step]
    return {name: value for name, value in rows[-1].items() if name.startswith("eval/")} if rows else {}


def _with_best(
    like: TrainState, store: Store, evaluations: Evaluations, state: TrainState, step: int, say: Say, *, has_adapters: bool
) -> tuple[TrainState, int]:
    """Return the state with the weights of the best checkpoint, and their step; `like` has the shapes of a state."""
    best = evaluations.best
    if best.step is None or best.step == step or best.step not in store.steps():
        return state, step
    loss = f"held-out loss {best.loss:.4f} instead of {evaluations.values['eval/loss']:.4f}"
    say(f"the best checkpoint is that of step {best.step} ({loss}): the run ends with it")
    if has_adapters:
        model = on_base(store.restore_part(best.step, adapters_of(like.model), "model"), base_of(state.model))
    else:
        model = store.restore_part(best.step, like.model, "model")
    state = eqx.tree_at(lambda s: s.model, state, model)
    if state.ema is not None:
        state = eqx.tree_at(lambda s: s.ema, state, store.restore_part(best.step, like.ema, "ema"))
    evaluations.sample = evaluations.samples.write(state.best_model)  # that of the last step is another model's
    return state, best.step
