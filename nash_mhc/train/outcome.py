"""What a run comes to: which checkpoint it ends with, what that is worth on text that nothing was chosen by, and how
it answers held-out questions that it was asked before it began. All of it in result.json."""

from __future__ import annotations

import json
from typing import Any

import equinox as eqx
import jax
import numpy as np

from nash_mhc.checkpoint.run_folder import EVALUATIONS, RESULT
from nash_mhc.model.lora import adapters_of, base_of, on_base
from nash_mhc.parallel.board import from_leader
from nash_mhc.train.evaluate import BrokenOff
from nash_mhc.train.session import Session
from nash_mhc.train.state import TrainState, sharded_abstract_state

_QUESTIONS = 3
_SHOWN = 70  # characters of a line


def ask_before(session: Session, state: TrainState) -> None:
    """What the model answers before its first step, where its data has prompts and responses."""
    if session.start.step > 0 or session.inputs.evaluator is None:
        return
    questions = session.inputs.evaluator.questions(_QUESTIONS)
    answers = session.samples.answer(state.best_model, [question.prompt for question in questions])
    if answers is None:
        return
    decode = lambda tokens: session.inputs.tokenizer.decode(np.asarray(tokens))
    rows = [
        {"prompt": decode(question.prompt), "response": decode(question.response), "before": answer}
        for question, answer in zip(questions, answers, strict=True)
    ]
    session.inputs.folder.write({RESULT: json.dumps({"answers": rows}, indent=2) + "\n"})


def finish(session: Session, state: TrainState, step: int) -> TrainState:
    """The state that the run ends with; scores it on the test split, once."""
    before = from_leader(session.inputs.folder.result)  # all processes must do the same
    if session.cfg.ends_with_best and session.inputs.evaluator is not None:
        state, step = _with_best(session, state, step)
    if before.get("step") == step:
        return state
    result: dict[str, Any] = {"step": step, "evaluation": _evaluation(session, step)}
    if (test := session.inputs.test) is not None:
        try:
            with session.clock.during("evaluation"):
                found = test.evaluate(state.best_model, session.watch.should_stop)
        except BrokenOff:
            return state
        result["test"] = {name.replace("eval/", "test/"): value for name, value in found.items()}
        session.evaluation |= result["test"]
        told = ", ".join(f"{name.removeprefix('test/')} {value:.4f}" for name, value in result["test"].items())
        session.reporter.say(f"test, step {step}: {told}")
    if rows := before.get("answers", []):
        questions = session.inputs.evaluator.questions(_QUESTIONS) if session.inputs.evaluator is not None else []
        answers = session.samples.answer(state.best_model, [question.prompt for question in questions]) or []
        result["answers"] = [row | {"after": answer} for row, answer in zip(rows, answers, strict=False)]
        for row in result["answers"]:
            session.reporter.say(f"asked: {_short(row['prompt'])}\n  right: {_short(row['response'])}")
            session.reporter.say(f"  before: {_short(row['before'])}\n  now: {_short(row['after'])}")
    if jax.process_index() == 0 and len(result) > 2:
        session.inputs.folder.write({RESULT: json.dumps(result, indent=2) + "\n"})
    return state


def _short(text: str) -> str:
    line = " ".join(text.split()) or "(nothing)"
    # The end of it, where a question is asked.
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN // 4]} ... {line[5 + _SHOWN // 4 - _SHOWN :]}"


def _evaluation(session: Session, step: int) -> dict[str, Any]:
    rows = [row for row in session.inputs.folder.rows(EVALUATIONS) if row["step"] == step]
    return {name: value for name, value in rows[-1].items() if name.startswith("eval/")} if rows else {}


def _with_best(session: Session, state: TrainState, step: int) -> tuple[TrainState, int]:
    """With the weights of the best checkpoint: (the state, their step)."""
    best, store = session.best, session.store
    if best.step is None or best.step == step or best.step not in store.steps():
        return state, step
    loss = f"held-out loss {best.loss:.4f} instead of {session.evaluation['eval/loss']:.4f}"
    session.reporter.say(f"the best checkpoint is that of step {best.step} ({loss}): the run ends with it")
    like = sharded_abstract_state(session.cfg, session.mesh)
    if session.cfg.lora.rank:
        model = on_base(store.restore_part(best.step, adapters_of(like.model), "model"), base_of(state.model))
    else:
        model = store.restore_part(best.step, like.model, "model")
    state = eqx.tree_at(lambda s: s.model, state, model)
    if state.ema is not None:
        state = eqx.tree_at(lambda s: s.ema, state, store.restore_part(best.step, like.ema, "ema"))
    session.sample = session.samples.write(state.best_model)  # that of the last step would be another model's
    return state, best.step
