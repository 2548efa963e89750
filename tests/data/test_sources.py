"""Row sources of stories and text files, and their tokenizers."""

import dataclasses
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from corpora import save_tokenizer

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.loader import count_bytes
from nash_mhc.data.pack import Rows
from nash_mhc.data.prepared.folder import PreparedRows
from nash_mhc.data.sources import RowSource, loss_floor, open_source
from nash_mhc.data.stories import Story, StoryRows, lowest_loss, story, story_grammar
from nash_mhc.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from tests.ambiguity import text_lengths

BYTES = ByteTokenizer()
MIXED = "naïve café, 東京, 🙂 and a tab\t"


def story_rows(seed: int = 0, split: str = "train", seq_len: int = 64) -> StoryRows:
    return StoryRows(BYTES, seed=seed, split=split, seq_len=seq_len)


def same(left: Rows, right: Rows) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def texts_of(rows: Rows) -> list[str]:
    """The text of each segment of one row."""
    return [BYTES.decode(rows.targets[rows.segments == s]) for s in range(1, rows.segments.max() + 1)]


# --- stories ---------------------------------------------------------------------------------------------------------


def test_any_order_gives_the_same_rows() -> None:
    source = story_rows()
    numbers = [0, 1, 63, 64, 65, 700, 64 * 9 + 3]  # some far enough apart to leave the cache and come back
    in_order = [source[i] for i in numbers]
    again = story_rows()
    for number, rows in reversed(list(zip(numbers, in_order, strict=True))):
        assert same(again[number], rows)
        assert same(source[number], rows)
    assert not any(same(a, b) for i, a in enumerate(in_order) for b in in_order[:i])


def test_rows_have_the_shape_and_the_types_of_a_step() -> None:
    row = story_rows()[5]
    assert [a.shape for a in row] == [(64,)] * 4
    assert [a.dtype for a in row] == [np.int32, np.int32, np.int32, np.float32]
    assert isinstance(story_rows(), RowSource)
    assert len(story_rows()) > 10**15


def test_seeds_and_splits_share_no_story() -> None:
    kinds = [(0, "train"), (0, "validation"), (1, "train")]
    sources = [story_rows(seed, split, 1024) for seed, split in kinds]
    texts = [{t for i in range(64) for t in texts_of(source[i])} for source in sources]
    assert all(len(t) > 100 for t in texts)
    assert not texts[0] & texts[1]
    assert not texts[0] & texts[2]


def test_volumes_share_no_story() -> None:
    source = story_rows(seq_len=1024)
    texts = [[t for i in range(64 * v, 64 * v + 64) for t in texts_of(source[i]) if t.endswith(".")] for v in (0, 1)]
    assert len({*texts[0], *texts[1]}) == len(texts[0]) + len(texts[1])


def test_a_pickled_source_gives_the_same_rows() -> None:
    source = story_rows(seed=4)
    before = source[70]
    data = pickle.dumps(source)
    assert same(pickle.loads(data)[70], before)
    assert len(data) < 200_000  # the recipe, not the rows


def starts_of(rows: Rows) -> np.ndarray:
    return np.flatnonzero(np.diff(rows.segments, prepend=0) > 0)


def test_aligned_rows_start_documents_at_multiples(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number}: " + "x" * (300 + number % 11))  # worth aligning
    for dataset in ("stories", str(tmp_path / "text")):
        cfg = DataConfig(dataset=dataset, seq_len=1024, cache_dir=str(tmp_path / "cache"))
        plain, aligned = (open_source(cfg, BYTES, split="train", seed=0, align=align) for align in (1, 8))
        assert any((starts_of(plain[i]) % 8).any() for i in range(min(4, len(plain))))  # it is not so by itself
        rows = [aligned[i] for i in range(min(64, len(aligned)))]
        assert sum(len(starts_of(row)) for row in rows) >= 30
        assert not any((starts_of(row) % 8).any() for row in rows)
        # Text still fills them: gaps cost half a block a document.
        assert dataset != "stories" or np.mean([row.weights.mean() for row in rows]) > 0.9


def test_the_loss_of_packed_stories_is_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows longer than the longest story, so that none is cut: what a perfect model would pay is the stories' own cost.
    costs: dict[str, float] = {}

    def recorded(seed: int, split: str, index: int) -> Story:
        found = story(seed, split, index)
        costs[found.text] = found.nats
        return found

    monkeypatch.setattr("nash_mhc.data.stories.story", recorded)
    seq_len = text_lengths(story_grammar())[1] + 1
    source = story_rows(seed=2, seq_len=seq_len)
    rows = [source[i] for i in range(StoryRows.rows_per_volume)]
    texts = [text for row in rows for text in texts_of(row)]
    assert len(texts) == len(set(texts)) > 400
    slots = sum(float(row.weights.sum()) for row in rows)
    assert slots == sum(len(text) + 1 for text in texts)
    nats = math.fsum(costs[text] for text in texts)
    assert nats / slots == pytest.approx(lowest_loss()[0], rel=0.015)
    # Hardly any story is left out, and hardly any slot is padding.
    assert len(texts) > 0.95 * len(costs)
    assert slots > 0.95 * seq_len * len(rows)


def test_the_floor_is_known_for_byte_stories_only(tmp_path: Path) -> None:
    assert loss_floor(DataConfig(), BYTES) == lowest_loss()
    assert loss_floor(DataConfig(dataset=str(tmp_path)), BYTES) is None


# --- text files ------------------------------------------------------------------------------------------------------


def write_book(folder: Path, files: int = 4, words: int = 400) -> str:
    """Files of numbered words, so that every row is different."""
    for number in range(files):
        text = " ".join(f"{number}-{word}" for word in range(words))
        (folder / f"part{number}" / "more").mkdir(parents=True)
        (folder / f"part{number}" / "more" / "text.txt").write_text(text, encoding="utf-8")
    (folder / "notes.bin").write_text("not a text file")
    return str(folder)


def all_rows(source: RowSource) -> list[Rows]:
    return [source[i] for i in range(len(source))]


def test_splits_of_a_folder_are_disjoint_and_complete(tmp_path: Path) -> None:
    cfg = DataConfig(dataset=write_book(tmp_path / "book"), seq_len=32, cache_dir=str(tmp_path / "cache"))
    train, validation = (open_source(cfg, BYTES, split=split, seed=0) for split in ("train", "validation"))
    assert isinstance(train, PreparedRows)
    assert isinstance(train, RowSource)
    held_out, rest = ({row.inputs.tobytes() for row in all_rows(s)} for s in (validation, train))
    assert not held_out & rest
    assert validation.manifest.splits["validation"].documents == 1  # of four: there are no smaller parts that were whole
    size = sum(f.stat().st_size + 1 for f in (tmp_path / "book").rglob("*.txt"))  # each file and its end
    assert sum(row.weights.sum() for s in (train, validation) for row in all_rows(s)) == size
    assert size == sum(count_bytes(row, BYTES.byte_lengths) for s in (train, validation) for row in all_rows(s)) + 4


def test_a_dataset_is_prepared_once_and_again_when_content_or_settings_change(tmp_path: Path) -> None:
    book, cache = tmp_path / "book", tmp_path / "cache"
    write_book(book)
    cfg = DataConfig(dataset=str(book), seq_len=32, cache_dir=str(cache))
    open_source(cfg, BYTES, split="train", seed=0)
    (only,) = cache.iterdir()
    stamp = (only / "manifest.json").stat().st_mtime_ns
    book.rename(tmp_path / "moved")
    open_source(dataclasses.replace(cfg, dataset=str(tmp_path / "moved")), BYTES, split="validation", seed=3)
    assert [f.stat().st_mtime_ns for f in cache.glob("*/manifest.json")] == [stamp]
    (tmp_path / "moved").rename(book)
    changes = [{"seq_len": 64}, {"validation_fraction": 0.1}, {"max_documents": 2}]
    for count, change in enumerate(changes, start=2):
        open_source(dataclasses.replace(cfg, **change), BYTES, split="train", seed=0)  # type: ignore[arg-type]
        assert len(list(cache.iterdir())) == count
    file = book / "part0" / "more" / "text.txt"
    file.write_text(file.read_text().replace("0-7", "0-8"))  # as long as before
    open_source(cfg, BYTES, split="train", seed=0)
    assert len(list(cache.iterdir())) == 5


def test_a_text_too_small_for_a_validation_split_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only a little")
    cfg = DataConfig(dataset=str(tmp_path / "a.txt"), seq_len=32, cache_dir=str(tmp_path / "cache"))
    assert len(open_source(cfg, BYTES, split="train", seed=0)) == 1
    with pytest.raises(ConfigError, match=r"has no rows of split 'validation'.*train.*--seq-len"):
        open_source(cfg, BYTES, split="validation", seed=0)


@pytest.mark.parametrize(
    ("cfg", "split", "message"),
    [
        (DataConfig(dataset="storys"), "train", r"--dataset storys: neither 'stories' nor .* hf:storys"),
        (DataConfig(dataset_name="x"), "train", r"--dataset-name x: dataset 'stories' has no subsets; leave it out"),
        (DataConfig(), "test", r"split 'test': .*train and validation"),
    ],
)
def test_unknown_datasets_are_refused(cfg: DataConfig, split: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(cfg, BYTES, split=split, seed=0)


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_bytes_round_trip() -> None:
    tokens = BYTES.encode(MIXED)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(MIXED.encode())
    assert BYTES.decode(tokens) == MIXED
    assert BYTES.decode(np.append(tokens, BYTES.end)) == MIXED  # the end marker is no text
    assert BYTES.decode(tokens[:4]) == "naï"[:2] + "ï"
    assert BYTES.encode("").shape == (0,)


def test_byte_lengths_of_bytes() -> None:
    assert BYTES.byte_lengths.shape == (BYTES.vocab_size,)
    assert BYTES.byte_lengths[BYTES.encode(MIXED)].sum() == len(MIXED.encode())
    assert BYTES.byte_lengths[BYTES.end] == 0


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_a_local_hugging_face_tokenizer_round_trips(merged: Tokenizer) -> None:
    assert isinstance(merged, HuggingFaceTokenizer)
    for text in ("the cat sat on the mat", MIXED):
        tokens = merged.encode(text)
        assert tokens.dtype == np.int32
        assert tokens.max() < merged.vocab_size
        assert merged.end not in tokens
        assert merged.decode(np.append(tokens, merged.end)) == text
    assert len(merged.encode("the cat sat")) < len("the cat sat")


def test_byte_lengths_add_up_to_the_text(merged: Tokenizer) -> None:
    assert merged.byte_lengths.shape == (merged.vocab_size,)
    assert merged.byte_lengths[merged.end] == 0
    for text in ("the cat sat on the mat", MIXED):
        assert merged.byte_lengths[merged.encode(text)].sum() == len(text.encode())


def test_byte_lengths_count_the_spaces_and_bytes_of_sentence_pieces(tmp_path: Path) -> None:
    """Pieces in the manner of SentencePiece: a mark for the space, and single bytes for characters it does not know."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", "<eos>", "▁", "c", "a", "t", "▁c", "at", "▁cat", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "c"), ("a", "t"), ("▁c", "at")]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ("cat cat a cat", "a 東 cat"):
        assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_stories_can_be_read_with_any_tokenizer(merged: Tokenizer) -> None:
    row = StoryRows(merged, seed=0, split="train", seq_len=512)[0]
    assert row.inputs[0] == merged.end
    assert merged.decode(row.targets[row.segments == 1]).startswith(("Once", "Long", "Last", "In"))
    assert loss_floor(DataConfig(), merged) is None


def test_unusable_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer gpt9: neither 'bytes' nor .* hf:gpt9"):
        load_tokenizer("gpt9")
    for name in ("hf:gpt9", "nobody/gpt9"):
        with pytest.raises(ConfigError, match=rf"--tokenizer {name}: .*Hugging Face \(.+\)"):
            load_tokenizer(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--tokenizer .*empty: .*no tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--tokenizer .*empty: transformers cannot read this tokenizer \(.+\)"):
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"neither an eos nor a bos token"):
        load_tokenizer(save_tokenizer(tmp_path / "endless", ends=False))
