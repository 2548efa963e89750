"""Inspection of prepared folders and of the steps of a run."""

import dataclasses
import json
from pathlib import Path

import pytest
import small
from corpora import prepared

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data import __main__ as command
from nash_mhc.data.inspection import of_prepared, of_run, rows_of_step
from nash_mhc.data.loader import batches
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
FACTS = [f"fact {i}: {i * i} is the square of {i}, {'and so on ' * (i % 5)}end of {i}" for i in range(300)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("facts")
    (folder / "src").mkdir()
    for part in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in FACTS[part * 100 : part * 100 + 100]]
        (folder / "src" / f"part{part}.jsonl").write_text("".join(lines))
    prepared(folder / "out", folder / "src", align=16)
    return folder


def as_run(folder: Path, facts: Path, **data: object) -> tuple[Path, RunConfig]:
    """Write a run directory with what inspect reads."""
    cfg = small.config(
        data__dataset=str(facts / "src"), data__seq_len=256, data__batch_size=4, train__grad_accum=2, train__seed=5
    )
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, cache_dir=str(folder / "cache"), **data))  # type: ignore[arg-type]
    source = open_source(cfg.data, BYTES, split="train", seed=5, align=cfg.model.coarsest_stride)
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"config": cfg.to_dict(), "rows": source.identity}))
    return folder, cfg


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_shows_the_documents_of_its_batch(tmp_path: Path, facts: Path, mixed: bool) -> None:
    data = {"dataset": f"{facts}/src:0.6,stories:0.4"} if mixed else {}
    folder, cfg = as_run(tmp_path / "run", facts, **data)
    source = open_source(cfg.data, BYTES, split="train", seed=5, align=cfg.model.coarsest_stride)
    reader = batches(source, batch_size=4, grad_accum=2, seed=5, start_step=6)  # the batch of the seventh step
    batch = next(reader)
    reader.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"--step 7: beyond the last step of this run \(1,"):
        of_run(RunFolder(folder), 7, None)
    (folder / "metrics.jsonl").write_text('{"step": 7}\n{"step": 9, "lo')  # truncated, as by a full disk
    shown = of_run(RunFolder(folder), 7, None).split("== ")[1:]
    assert len(shown) == 8
    found = 0
    for number, text in enumerate(shown):
        assert text.startswith(f"step 7, row {number}: row ")
        row = [a.reshape(8, 256)[number] for a in batch]
        documents = [BYTES.decode(row[1][(row[2] == s) & (row[3] > 0)]) for s in range(1, row[2].max() + 1)]
        blocks = text.split("-- slots ")[1:]
        assert [block.partition("\n")[2].rstrip("\n") for block in blocks] == documents
        for block, document in zip(blocks, documents, strict=True):
            if "part" in block.splitlines()[0]:  # file and line lead to the very document
                place = block.splitlines()[0].split(", ")[1]
                file, line = place.split(":")
                assert FACTS[int(file[4]) * 100 + int(line) - 1] == document
                found += 1
        assert of_run(RunFolder(folder), 7, number) == "== " + text.rstrip("\n")
    assert found > 10
    # The same rows by number alone, for a line about a step.
    titles = [text.split(": row ")[1].split(":")[0].split(" of ") for text in shown]
    named = rows_of_step(source, 7, 8, 5)
    for name in {name for _, name in titles}:
        numbers = [index for index, of in titles if of == name]
        assert f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)} of {name}" in named
    assert rows_of_step(source, 7, 8, 5, most=3).endswith(" and 5 more")
    if mixed:
        assert any("of stories" in text for text in shown)


def test_statistics_of_a_prepared_folder(
    facts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["data", "inspect", str(facts / "out")])
    assert command.main() == 0
    out = capsys.readouterr().out
    size = sum(len(text) for text in FACTS)
    assert f"{size:,} bytes of text in 3 files" in out
    assert "train: 285 documents" in out
    assert "validation: 15 documents" in out
    row = of_prepared(facts / "out", "validation", None, 0)
    assert row.startswith("== row 0 of validation: ")
    documents = [block.partition("\n")[2].rstrip("\n") for block in row.split("-- slots ")[1:]]
    assert documents
    assert set(documents) <= set(FACTS)
    # A step of a run on this folder alone, by the settings of the run.
    assert of_prepared(facts / "out", "train", 3, 1, batch_size=4, seed=2) != of_prepared(
        facts / "out", "train", 3, 1, batch_size=4
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{out}", "--row", "9999"], r"--row 9999: split 'train' has rows 0 to \d+"),
        (["{out}", "--step", "0"], r"--step must be at least 1, not 0; steps are counted as in metrics\.jsonl"),
        (["{out}", "--step", "1", "--row", "8"], r"--row 8: a step of this run has rows 0 to 7"),
        (["{out}", "--split", "test"], r"has no rows of split 'test'.*train and validation"),
        (["{src}"], r"src: neither prepared data nor a run"),
        ([], r"no folder given"),
        (["{out}", "--stp", "1"], r"unknown flag --stp; did you mean --step\?"),
    ],
)
def test_mistakes(facts: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.inspect_command([word.format(out=facts / "out", src=facts / "src") for word in argv])


def test_damaged_and_changed_data_is_reported(tmp_path: Path, facts: Path) -> None:
    folder, cfg = as_run(tmp_path / "run", facts)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"rows": "others"}))
    with pytest.raises(ConfigError, match=r"the data of --dataset .* has changed"):
        of_run(RunFolder(folder), 1, None)
    (prepared,) = Path(cfg.data.cache_dir).iterdir()
    origins = prepared / "train-00000.origins"
    data = bytearray(origins.read_bytes())
    data[-1] ^= 1
    origins.write_bytes(data)
    with pytest.raises(ConfigError, match=r"train-00000\.origins: .*content has changed"):
        of_prepared(prepared, "train", None, 0)


def test_scored_text_is_green_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qa.jsonl").write_text(json.dumps({"prompt": "Why?", "response": "So.\n\nOr so."}) + "\n")
    prepared(tmp_path / "out", tmp_path / "qa.jsonl", validation_fraction=0.0)
    green = lambda text: f"\x1b[32m{text}\x1b[0m"
    plain = "[[user: Why?\nassistant: ]]So.\n\nOr so.\n"
    colored = f"user: Why?\nassistant: {green('So.')}\n\n{green('Or so.')}\n"

    def shown(*flags: str) -> str:
        assert command.inspect_command([str(tmp_path / "out"), "--row", "0", *flags]) == 0
        return capsys.readouterr().out.split("\n", 2)[2].rstrip("\n") + "\n"

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown() == shown("--color", "never") == plain  # no terminal
    assert shown("--color", "always") == colored
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert shown() == colored
    assert shown("--color", "never") == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == plain
    assert shown("--color", "always") == colored
    with pytest.raises(ConfigError, match="--color: invalid choice: 'blue'"):
        shown("--color", "blue")
