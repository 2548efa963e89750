"""Small texts, a small tokenizer, and datasets prepared from them."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from nash_mhc.config.schema import DataConfig
from nash_mhc.data.loader import batches
from nash_mhc.data.pack import Rows
from nash_mhc.data.prepared.folder import Manifest, PreparedRows
from nash_mhc.data.prepared.prepare import prepare
from nash_mhc.data.recipe import make_recipe
from nash_mhc.data.sources import RowSource, open_corpus
from nash_mhc.data.stories import story
from nash_mhc.data.tokenizer import ByteTokenizer, Tokenizer

BYTES = ByteTokenizer()


def stories(count: int, start: int = 0) -> list[str]:
    return [story(9, "train", start + i).text for i in range(count)]


def prepared(out: Path, dataset: Path | str, tokenizer: Tokenizer = BYTES, align: int = 8, **settings: Any) -> Manifest:
    workers = settings.pop("workers", 1)
    cfg = DataConfig(**{"dataset": str(dataset), "seq_len": 256} | settings)
    corpus = open_corpus(cfg)
    recipe = make_recipe(cfg, tokenizer, corpus, align)
    return prepare(recipe, tokenizer, corpus, out, dataset=cfg.dataset, workers=workers)


def texts(folder: Path, split: str = "train", tokenizer: Tokenizer = BYTES) -> list[str]:
    """Decode the scored targets of each segment of each row."""
    rows = PreparedRows(folder, split)
    found = []
    for i in range(len(rows)):
        row = rows[i]
        for s in range(1, row.segments.max() + 1):
            found.append(tokenizer.decode(row.targets[(row.segments == s) & (row.weights > 0)]))
    return found


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    data = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents)).encode()
    if path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as out:
            out.write(data)
    else:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


DOCUMENTS = ["naïve café, 東京, 🙂", "second\nline", *(f"document {i} " + "x" * (7 * i % 90) for i in range(40))]


def save_tokenizer(folder: Path, *, ends: bool = True) -> str:
    """A tiny byte-level BPE tokenizer, as `save_pretrained` would leave it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat, the cat sat on the hat " * 5], trainer)
    # As many published ones do, it would put its end behind every text; documents get theirs from `pack`.
    backend.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<eos>"} if ends else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def take(source: RowSource, count: int, **options: Any) -> list[Rows]:
    """The first batches; the reader is closed again."""
    reader = batches(source, **({"batch_size": 8, "grad_accum": 1, "seed": 0} | options))
    try:
        return list(itertools.islice(reader, count))
    finally:
        reader.close()  # type: ignore[attr-defined]


def every_byte(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
