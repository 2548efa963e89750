"""Field templates: tokens, and which of them are scored."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_process import CommandProcess
from corpora import BYTES, prepared
from records import expected, learned, write

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.files import columns_of
from nash_mhc.data.prepared.folder import PreparedRows
from nash_mhc.data.recipe import corpus_texts, template_settings
from nash_mhc.data.sources import open_corpus, open_source

# The public recipe's text (legal questions with reasoning), cut where its prompt ends.
PROMPT = r"### Instruction:\n{question}\n\n### Response:"
RESPONSE = (
    r"\n### Topic: {topic}\n### Difficulty: {difficulty}\n[\n### Reasoning:\n{reasoning}\n]\n### Answer:\n{answer}"
    r"[\n\n### Case Citation:\n{case_citation}]"
)
FULL = {
    "question": "May he?", "answer": "No.", "topic": "Tort", "difficulty": 3, "reasoning": "A duty\nof care.",
    "case_citation": "[1932] AC 562",
}  # fmt: skip
ASKED = "### Instruction:\nMay he?\n\n### Response:"
HEAD = "\n### Topic: Tort\n### Difficulty: 3\n"
WHY, CITED = "\n### Reasoning:\nA duty\nof care.\n", "\n\n### Case Citation:\n[1932] AC 562"


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, HEAD + WHY + "\n### Answer:\nNo." + CITED),
        ({"reasoning": ""}, HEAD + "\n### Answer:\nNo." + CITED),
        ({"reasoning": None, "case_citation": " \n"}, HEAD + "\n### Answer:\nNo."),
        ({"case_citation": float("nan")}, HEAD + WHY + "\n### Answer:\nNo."),
    ],
)
def test_field_templates_give_the_expected_tokens(changes: dict[str, Any], answer: str) -> None:
    templates = {"prompt_template": PROMPT, "response_template": RESPONSE}
    wanted = expected((ASKED, False), (answer, True), (BYTES.end, True))
    assert learned(FULL | changes, **templates) == wanted
    # As YAML leaves it, with real line ends; and with everything counted.
    real = {name: text.replace(r"\n", "\n") for name, text in templates.items()}
    assert learned(FULL | changes, **real, loss_on="all") == [(token, True) for token, _ in wanted]
    missing = {name: value for name, value in FULL.items() if name not in changes}
    assert learned(missing, **templates) == wanted  # as an empty one


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_packing_does_not_change_which_targets_are_scored(tmp_path: Path, kind: str) -> None:
    records = [{"q": f"what is {i}?", "a": f"{i}!", "hint": "h" * (i % 3)} for i in range(60)]
    settings = {"prompt_template": r"{q}[ ({hint})]\n", "response_template": "{a}[ {never}]"}
    file = tmp_path / f"qa.{kind}"
    pq.write_table(pa.Table.from_pylist(records), file) if kind == "parquet" else write(file, records)
    prepared(tmp_path / "out", file, format="fields", validation_fraction=0.0, align=4, **settings)
    rows = PreparedRows(tmp_path / "out", "train")
    assert len(rows) < 15  # several share one
    cfg = DataConfig(
        dataset=str(file), format="fields", streaming=True, cache_dir=str(tmp_path), validation_fraction=0.0, **settings
    )
    assert columns_of(cfg, "fields").among(["hint", "a", "q"], "x") == ["q", "a", "hint"]  # what is optional may be missing
    found = []
    for number in range(len(rows)):
        row = rows[number]
        for segment in range(1, row.segments.max() + 1):
            at = row.segments == segment
            counts = row.weights[at] > 0
            last = int(np.flatnonzero(counts)[-1]) + 1  # only the gap to the next document follows
            found.append([(int(t), bool(c)) for t, c in zip(row.targets[at][:last], counts[:last], strict=True)])
    alone = [learned(record, **settings) for record in records]
    assert sorted(found) == sorted(alone)
    if kind == "parquet":
        row = open_source(cfg, BYTES, split="train", seed=0)[0]
        first = [(int(t), w > 0) for t, w in zip(row.targets[row.segments == 1], row.weights[row.segments == 1], strict=True)]
        assert first in alone


def test_escapes_in_field_templates() -> None:
    settings = {"prompt_template": r"\[INST\] {my field} \\n \{x\}\t\d", "response_template": "{a}"}
    text = "[INST] v{1}[2] \\n {x}\t\\d"
    assert learned({"my field": "v{1}[2]", "a": "b"}, **settings) == expected((text, False), ("b", True), (BYTES.end, True))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no field", r"--prompt-template 'no field': contains no field; .*\{question\}"),
        ("{q}[ {a}", r"the \[ at character 4 has no partner .*\\\["),
        ("{q}] {a}", r"the \] at character 4 has no partner .*\\\]"),
        ("{q}[a [{b}]]", r"the \[ at character 4 has no partner"),
        ("[INST] {q}", r"the \[ \] at character 1 contains no field; write \\\[ and \\\]"),
        ("{q} {", r"the \{ at character 5 .*field name; .*\{question\}, or \\\{"),
        ("{}", r"the \{ at character 1 .*field name"),
    ],
)
def test_invalid_field_templates_are_refused(tmp_path: Path, template: str, message: str) -> None:
    file = write(tmp_path / "qa.jsonl", [{"q": "x", "a": "y"}])
    with pytest.raises(ConfigError, match=message) as refused:
        prepared(tmp_path / "out", file, format="fields", prompt_template=template, response_template="{a}")
    assert "\n" not in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["qa.jsonl"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_template": "{q}"}, "^--prompt-template needs --format fields"),
        ({"format": "chat", "response_template": "{q}"}, "^--response-template needs --format fields"),
        ({"format": "fields", "prompt_template": "{q}"}, "--format fields needs --response-template"),
        ({"format": "fields"}, "--format fields needs --prompt-template"),
        (
            {"format": "fields", "prompt_template": "{q}", "response_template": "{a}", "template": "{content}"},
            "--template {content}; .*--template tokenizer",
        ),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "--validation-fraction 0.5 and --test-fraction 0.5 "),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"q": "x", "b": "y"},
            r"qa\.jsonl:3: no field 'a' .fields: q, b.; .* in \[ \] in --response-template",
        ),
        ({"q": "x", "aa": "y"}, r"qa\.jsonl:3: no field 'a', which --response-template names; did you mean aa\?"),
        ({"q": "x", "a": " "}, r"qa\.jsonl:3: field 'a' is empty; .* in \[ \] in --response-template"),
        ({"q": None, "a": "y"}, r"qa\.jsonl:3: field 'q' is empty; .* in --prompt-template"),
        ({"q": ["x"], "a": "y"}, r"qa\.jsonl:3: q is of type list, not text"),
        ({"q": True, "a": "y"}, r"qa\.jsonl:3: q is of type bool, not text"),
        ([1], r"qa\.jsonl:3: not a JSON object, but a value of type list"),
    ],
)
def test_missing_fields_are_reported_with_file_and_line(tmp_path: Path, record: Any, message: str) -> None:
    file = write(tmp_path / "qa.jsonl", [{"q": "x", "a": "y"}, {"q": "x", "a": "y"}, record])
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path / "out", file, format="fields", prompt_template="{q}", response_template="{a}")
    assert [p.name for p in tmp_path.iterdir()] == ["qa.jsonl"]


def test_other_record_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"format": "fields", "prompt_template": "{q}", "response_template": "[{a}]"}
    with pytest.raises(ConfigError, match=r"qa:7: --response-template produces no text"):
        learned({"q": "x"}, **settings)
    (tmp_path / "notes.txt").write_text("just text")
    with pytest.raises(ConfigError, match=r"notes\.txt: --format fields needs records, .*--extensions"):
        prepared(tmp_path / "out", tmp_path / "notes.txt", **settings)
    pq.write_table(pa.table({"a": ["x"], "b": ["y"]}), tmp_path / "qa.parquet")
    with pytest.raises(ConfigError, match=r"qa\.parquet:1: no column 'q' .columns: a, b."):
        prepared(tmp_path / "out", tmp_path / "qa.parquet", **settings)
    # The same from the command line: one line, exit code 2, nothing left.
    file = write(tmp_path / "qa.jsonl", [{"q": "x"}])
    argv = ["prepare", "--dataset", str(file), "--format", "fields", "--prompt-template", "{q}", "--response-template", "{a}"]
    argv += ["--out", str(tmp_path / "out")]
    done = CommandProcess(["-m", "nash_mhc.data", *argv], tmp_path).end()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {file}:1: no field 'a' (fields: q); ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_tokenizer_can_be_trained_on_fields(tmp_path: Path) -> None:
    file = write(tmp_path / "qa.jsonl", [FULL])
    cfg = DataConfig(dataset=str(file), format="fields", prompt_template="{question} ", response_template="{answer}")
    assert list(corpus_texts(cfg, open_corpus(cfg))) == ["May he? No."]
    with pytest.raises(ConfigError, match="--template tokenizer: no tokenizer"):
        template_settings(DataConfig(template="tokenizer"), "chat", None)
