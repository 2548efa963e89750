"""Prompts and chats: their text, and a loss over the answers only."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small
from corpora import prepared, save_tokenizer, write_jsonl

from nash_mhc.config.schema import TEMPLATE, ConfigError, DataConfig
from nash_mhc.data.documents.records import Raw, check_template, spans_of
from nash_mhc.data.inspection import of_prepared, show_row
from nash_mhc.data.prepared.folder import PreparedRows
from nash_mhc.data.recipe import document_of, pieces_of
from nash_mhc.data.sources import Mixture, open_source
from nash_mhc.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

BYTES = ByteTokenizer()
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
WRITTEN = "system: Be brief.\nuser: 1+1?\nassistant: Two.\nuser: Sure?\nassistant: Yes.\n"
ANSWERS = "Two.\nYes.\n"  # and what the template puts behind an answer, so that the model learns to stop


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def row_of(folder: Path, number: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = PreparedRows(folder, "train")
    row = rows[number]
    return row.inputs, row.targets, row.weights


def scored(targets: np.ndarray, weights: np.ndarray, tokenizer: Tokenizer = BYTES) -> str:
    return tokenizer.decode(targets[weights > 0])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_loss_covers_the_answers_of_a_chat(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"chat.{kind}"
    if kind == "jsonl":
        write(file, [{"messages": CHAT, "id": 1}])
    else:
        pq.write_table(pa.table({"messages": [CHAT], "id": [1]}), file)
    prepared(tmp_path / "out", file, format="chat", validation_fraction=0.0)
    inputs, targets, weights = row_of(tmp_path / "out")
    assert BYTES.decode(inputs[:100]) == WRITTEN  # the model reads all of it
    assert scored(targets, weights) == ANSWERS
    assert targets[weights > 0][-1] == BYTES.end  # and the end behind the last answer
    assert (targets[weights > 0] == BYTES.end).sum() == 1
    # Every scored target directly follows its input in the text.
    at = np.flatnonzero(weights)[:-1]
    assert (inputs[at + 1] == targets[at]).all()


def test_the_loss_can_cover_everything(tmp_path: Path) -> None:
    file = write(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    prepared(tmp_path / "out", file, format="chat", loss_on="all", validation_fraction=0.0)
    _, targets, weights = row_of(tmp_path / "out")
    assert scored(targets, weights) == WRITTEN
    assert weights.sum() == len(WRITTEN) + 1


def test_prompt_and_response_with_a_template(tmp_path: Path) -> None:
    file = write(tmp_path / "qa.jsonl", [{"prompt": "Why?", "response": "Because é."}])
    prepared(tmp_path / "out", file, format="prompt", template=r"<{role}>\n{content}</>\n", validation_fraction=0.0)
    inputs, targets, weights = row_of(tmp_path / "out")
    assert BYTES.decode(inputs[:80]) == "<user>\nWhy?</>\n<assistant>\nBecause é.</>\n"
    assert scored(targets, weights) == "Because é.</>\n"


def test_the_end_after_a_final_question_is_not_scored(tmp_path: Path) -> None:
    file = write(tmp_path / "chat.jsonl", [{"messages": CHAT[:4]}])
    prepared(tmp_path / "out", file, format="chat", validation_fraction=0.0)
    _, targets, weights = row_of(tmp_path / "out")
    assert scored(targets, weights) == "Two.\n"
    assert BYTES.end not in targets[weights > 0]


def test_tokens_do_not_cross_from_prompt_to_answer(tmp_path: Path) -> None:
    """A merge must not reach from the prompt into the answer: 'the c' + 'at' is not 'the cat'."""
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tok"))
    file = write(tmp_path / "qa.jsonl", [{"prompt": "the cat sat on the", "response": " mat, the cat sat"}])
    prepared(tmp_path / "out", file, tokenizer, format="prompt", template="{content}", validation_fraction=0.0)
    inputs, targets, weights = row_of(tmp_path / "out")
    assert scored(targets, weights, tokenizer) == " mat, the cat sat"
    assert tokenizer.decode(inputs) == "the cat sat on the mat, the cat sat"
    assert weights.sum() < len(" mat, the cat sat")


def test_pieces_without_answers_are_dropped() -> None:
    recipe = {"format": "prompt", "template": check_template(TEMPLATE), "loss_on": "response", "seq_len": 32}
    raw = Raw(0, 1, {"prompt": "p" * 100, "response": "r" * 50}, 150, "table")
    document = document_of(raw, ("a",), recipe)
    pieces, _ = pieces_of([document], recipe, BYTES, ("a",))
    targets = [int(t) for p in pieces for t, counts in zip(p.tokens[1:], p.scored, strict=True) if counts]
    assert BYTES.decode(np.array(targets)) == "r" * 50 + "\n"
    assert document.size == len("user: \nassistant: \n") + 150
    assert min(p.offset for p in pieces) > 90  # pieces of only prompt are dropped


def test_inspect_marks_unscored_text(tmp_path: Path) -> None:
    file = write(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    prepared(tmp_path / "out", file, format="chat", validation_fraction=0.0)
    shown = of_prepared(tmp_path / "out", "train", None, 0)
    assert "[[system: Be brief.\nuser: 1+1?\nassistant: ]]Two.\n[[user: Sure?\nassistant: ]]Yes.\n" in shown


def test_other_names_of_the_answering_role_are_known() -> None:
    for role in ("assistant", "model", "gpt"):
        record = {"messages": [{"role": "user", "content": "x"}, {"role": role, "content": "y"}]}
        spans = spans_of(Raw(0, 1, record, 1, "table"), "a", {"format": "chat", "template": TEMPLATE, "loss_on": "response"})
        assert [span.text for span in spans if span.scored] == ["y\n"]


def test_special_tokens_are_recognized_in_templates_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    (end, number), *_ = tokenizer._special.items()
    assert number == tokenizer.end
    said = f"the {end} of it"
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):  # worker processes have a copy
        assert number not in copy.encode(said)
        assert tokenizer.decode(copy.encode(said)) == said
    file = write(tmp_path / "qa.jsonl", [{"prompt": said, "response": f"{end} and on"}])
    template = f"{end}{{role}} says {{content}}{end}{end}."
    prepared(tmp_path / "out", file, tokenizer, template=template, validation_fraction=0.0)
    _, targets, weights = row_of(tmp_path / "out")
    told = targets[: int(np.flatnonzero(weights)[-1]) + 1].tolist()
    text = lambda words: tokenizer.encode(words).tolist()
    wanted = [number, *text("user says "), *text(said), number, number, *text(".")]
    wanted += [number, *text("assistant says "), *text(f"{end} and on"), number, number, *text("."), number]
    assert told == wanted
    # The text and what the template puts behind it are tokenized as one, up to the first special token.
    assert tokenizer.split_special("a" + end + "b") == ["a", number, "b"]


def test_tokens_outside_the_vocabulary_are_refused_when_preparing(tmp_path: Path) -> None:
    class Overflowing(ByteTokenizer):
        vocab_size = 100

    write_jsonl(tmp_path / "a.jsonl", ["ABC", "xyz"])
    table = pa.table({"text": ["ABC", "xyz"]})
    pq.write_table(table, tmp_path / "a.parquet")
    wanted = r":2: the tokenizer returns token 120 .* 100 tokens \(0 to 99\)"
    with pytest.raises(ConfigError, match=r"a\.jsonl" + wanted):
        prepared(tmp_path / "out", tmp_path / "a.jsonl", Overflowing())
    assert not list(tmp_path.glob("out*"))
    cfg = DataConfig(dataset=str(tmp_path / "a.parquet"), streaming=True, cache_dir=str(tmp_path), validation_fraction=0.0)
    with pytest.raises(ConfigError, match=r"a\.parquet" + wanted):
        open_source(cfg, Overflowing(), split="train", seed=0)[0]


def test_a_mixture_can_hold_text_and_chats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only text " * 100)
    write(tmp_path / "qa.jsonl", [{"prompt": f"{i}?", "response": f"{i}!", "id": i} for i in range(200)])
    chats = [[("user", f"say {i}"), ("assistant", "no")] for i in range(200)]
    write(tmp_path / "chat.jsonl", [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats])
    write(tmp_path / "plain.jsonl", [{"text": f"text {i}", "messages": []} for i in range(200)])
    names = [tmp_path / name for name in ("a.txt", "qa.jsonl", "chat.jsonl", "plain.jsonl")]
    cfg = DataConfig(dataset=",".join(f"{name}:0.25" for name in names), seq_len=64, cache_dir=str(tmp_path / "cache"))
    source = open_source(cfg, BYTES, split="train", seed=0)
    assert isinstance(source, Mixture)
    assert [s.manifest.recipe["format"] for s in source._sources] == ["text", "prompt", "chat", "text"]
    shown = "".join(show_row("", source[i], BYTES, []) for i in range(40))
    for part in ("only text", "]]14!", "assistant: ]]no", "text 1"):
        assert part in shown
    with pytest.raises(ConfigError, match=r"qa\.jsonl:1: no field 'messages' .fields: prompt, response, id."):
        open_source(dataclasses.replace(cfg, dataset=str(names[1]), format="chat"), BYTES, split="train", seed=0)


def test_a_run_learns_only_the_answers(tmp_path: Path) -> None:
    """The real thing: questions are noise, answers are one of two words;
    the loss goes far below that of the questions."""
    from nash_mhc.train import run

    rng = np.random.default_rng(0)
    records = []
    for _ in range(600):
        question = "".join(rng.choice(list("abcdefghijklmnop"), 12))
        records.append({"prompt": question, "response": "vowels" if set(question) & set("aeio") else "none"})
    file = write(tmp_path / "qa.jsonl", records)
    data = {"dataset": str(file), "format": "prompt", "template": "{content} ", "cache_dir": str(tmp_path / "cache")}
    cfg = small.config(
        **{f"data__{k}": v for k, v in data.items()}, train__total_steps=120, train__checkpoint_dir=str(tmp_path / "run")
    )
    result = run(cfg, quiet=True)
    assert result.evaluation["eval/loss"] < 0.35  # a letter of a question alone costs 2.8 nats
