"""Hugging Face datasets, from local folders: as a corpus to prepare, and as a stream."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from corpora import BYTES, DOCUMENTS, prepared, texts

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.hub import Hub
from nash_mhc.data.sources import open_corpus, open_test

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # when a test begins: it takes every worker that only looks for tests seconds

    globals().update(datasets=datasets)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def table(documents: list[str], field: str = "text") -> Any:
    return datasets.Dataset.from_dict({"id": list(range(len(documents))), field: documents})


@pytest.mark.parametrize("form", ["saved", "saved by name", "dict", "parquet", "jsonl"])
def test_every_form_of_a_local_dataset_is_read_once(tmp_path: Path, form: str) -> None:
    folder, held = tmp_path / "data", ["held out one", "held out two"]
    if form.startswith("saved"):
        table(DOCUMENTS, "body").save_to_disk(str(folder), num_shards=3)
    elif form == "dict":
        datasets.DatasetDict({"train": table(DOCUMENTS, "body"), "validation": table(held, "body")}).save_to_disk(str(folder))
    else:
        folder.mkdir()
        for split, documents in (("train", DOCUMENTS), ("validation", held)):
            (table(documents, "body").to_parquet if form == "parquet" else table(documents, "body").to_json)(
                str(folder / f"{split}.{form}")
            )
    name = str(folder) if form in ("saved", "dict") else f"hf:{folder}"
    manifest = prepared(tmp_path / "out", name, text_field="body")
    train, validation = texts(tmp_path / "out"), texts(tmp_path / "out", "validation")
    if form.startswith("saved"):  # no split of its own: a share is held out
        assert Counter(train + validation) == Counter(DOCUMENTS)
        assert len(validation) == 2
    else:
        assert (Counter(train), Counter(validation)) == (Counter(DOCUMENTS), Counter(held))
    assert manifest.files == ("data",)


def test_missing_splits_columns_and_datasets_are_reported(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table(["x"]), "test": table(["y"])}).save_to_disk(str(tmp_path / "d"))
    path = str(tmp_path / "d")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dataset": path, "split": "trian"}, r"d: no split 'trian' .splits: train, test.; .*--split"),
        (
            {"dataset": path, "text_field": "body"},
            r"d:1: no column 'body' .columns: id, text.; .*--text-field",
        ),
        ({"dataset": path, "dataset_name": "v2"}, r"--dataset-name v2: .*d has no subsets; leave it out"),
        (
            {"dataset": "hf:nobody/nothing"},
            r"--dataset nobody/nothing: the datasets library cannot read it \(ConnectionError: ",
        ),
        ({"dataset": "nobody/nothing"}, r"--dataset nobody/nothing: the datasets library cannot read it"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            list(open_corpus(DataConfig(**settings)).read("train"))
        assert "\n" not in str(caught.value)


def test_the_test_split_can_be_used_for_evaluation(tmp_path: Path) -> None:
    parts = {"train": table(DOCUMENTS), "test": table(["only this"]), "other": table(["never read"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    prepared(tmp_path / "out", tmp_path / "d", eval_split="test")
    assert texts(tmp_path / "out", "test") == ["only this"]
    assert Counter(texts(tmp_path / "out")) == Counter(DOCUMENTS)


def test_the_test_split_is_used_as_it_is(tmp_path: Path) -> None:
    """Without a validation split, a share of the rest is held out for evaluation."""
    own = ["only this", *DOCUMENTS]
    parts = {"train": table(DOCUMENTS), "test": table(own)}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    manifest = prepared(tmp_path / "out", tmp_path / "d", test_split="test", validation_fraction=0.2)
    assert sorted(texts(tmp_path / "out", "test")) == sorted(own)
    assert Counter([*texts(tmp_path / "out"), *texts(tmp_path / "out", "validation")]) == Counter(DOCUMENTS)
    assert "for the test" not in manifest.summary()
    settings = {"dataset": str(tmp_path / "d"), "cache_dir": str(tmp_path), "seq_len": 256, "validation_fraction": 0.2}
    for cfg in (DataConfig(**settings, test_fraction=0.1), DataConfig(**settings, test_split="test", streaming=True)):
        source = open_test(cfg, BYTES, align=8)
        assert source is not None
        assert any("only this" in BYTES.decode(source[row].targets) for row in range(12))
    with pytest.raises(ConfigError, match=r"--test-split final: the data has no such split .splits: train, test.; choose"):
        prepared(tmp_path / "other", tmp_path / "d", test_split="final")


def test_a_missing_variant_lists_all_variants(tmp_path):
    names = [f"variant_{number}" for number in range(12)]
    files = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in names)
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    read = lambda variant: Hub(str(tmp_path), DataConfig(dataset=f"hf:{tmp_path}", dataset_name=variant))
    for variant in (None, "variant"):
        with pytest.raises(ConfigError, match=r"--dataset-name: " + ", ".join(names)):
            read(variant)
    assert [raw.content for raw in read("variant_7").read("train")] == ["variant_7"]
