"""The built-in stories: endless short stories, reproducible by seed, of exactly known entropy.

A story opens with facts (who, where, which treasure), continues with a random number of events, and ends by repeating
facts of its opening. A model that uses the context predicts the ending almost for free; the events are mostly fresh
choices, so the lowest possible loss stays well above zero.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.records import Raw
from nash_mhc.data.order import combine, permuted
from nash_mhc.data.pack import Rows, RowSource, pack
from nash_mhc.data.stories.grammar import Chain, Choice, Held, Repeat, Scope, Text, sample
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import digest_of, write_atomic

SPLITS = ("train", "validation")


def _plural(word: str) -> str:
    if word.endswith(("ch", "sh", "s", "x")):
        return word + "es"
    return word[:-1] + "ies" if word.endswith("y") and word[-2] not in "aeiou" else word + "s"


def _word_lists(compounds: dict[str, list[str]], words: dict[str, str]) -> dict[str, tuple[str, ...]]:
    lists = {name: [first + last for first in a.split() for last in b.split()] for name, (a, b) in compounds.items()}
    lists |= {name: text.split() for name, text in words.items()}
    lists["manners"] = [mood + "ly" for mood in lists["moods"]]
    lists["counts"] = [str(number) for number in range(10, 100)]
    lists["prices"] = [str(number) for number in range(100, 1000)]
    # Plurals are separate lists, so that each word is a single draw, which keeps the grammar unambiguous.
    lists |= {f"many_{name}": [_plural(word) for word in lists[name]] for name in ("objects", "animals", "jobs", "trees")}
    del lists["trees"]
    return {name: tuple(entries) for name, entries in lists.items()}


_TEXTS = yaml.safe_load(Path(__file__).with_name("stories.yaml").read_text(encoding="utf-8"))
WORD_LISTS = _word_lists(_TEXTS["compounds"], _TEXTS["words"])

# Weights of the number of events: most stories have about five; a thin tail, falling with the fourth power, is several
# times as long. The largest count keeps the longest possible story under 4,000 bytes.
_BULK_OF_EVENTS = {3: 900, 4: 1300, 5: 1500, 6: 1400, 7: 1100, 8: 800, 9: 500, 10: 300, 11: 200, 12: 120}
_TAIL_OF_EVENTS = {count: round(110 * (12 / count) ** 4) or 1 for count in range(13, 51)}


class Story(NamedTuple):
    text: str
    nats: float
    """-ln P(text), which includes the number of events and the choice of the ending."""


@functools.cache
def story_grammar() -> Chain:
    scope = Scope(WORD_LISTS)
    beginning = Choice((weight, Text(words)) for weight, words in _TEXTS["beginnings"])
    opening = scope.parse(" " + _TEXTS["opening"])
    event, ending = (
        Choice((weight, scope.child().parse(" " + template)) for weight, template in _TEXTS[name])
        for name in ("events", "endings")
    )
    return Chain([beginning, opening, Repeat(event, _BULK_OF_EVENTS | _TAIL_OF_EVENTS), ending])


def story(seed: int, split: str, index: int) -> Story:
    """Return a story of an endless split."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: dataset 'stories' has {' and '.join(SPLITS)}")
    # String seeds are hashed, so neighbouring seeds are unrelated; Python guarantees random() across versions.
    return Story(*sample(story_grammar(), random.Random(f"nash-mhc story {seed} {split} {index}").random))


def lowest_loss() -> tuple[float, float]:
    """Return the lowest possible loss of the byte tokenizer, in nats/token (one end token per story) and bits/byte."""
    grammar = story_grammar()
    return grammar.entropy / (grammar.mean_bytes + 1), grammar.entropy / math.log(2) / grammar.mean_bytes


# Topic, question, name of the answer, reasoning.
_QUESTIONS = (
    ("place", "Where did {hero} live?", "home", "The story says that {hero} lived in {home}."),
    ("friend", "Who lived with {hero}?", "friend", "The story says that {hero} lived with {friend}."),
    ("animal", "Which animal lived with {hero}?", "pet", "With {hero} there was a {pet}."),
    ("colour", "Which colour had the {treasure}?", "colour", "The {treasure} of {hero} was {colour}."),
    ("treasure", "What was {colour}?", "treasure", "The {colour} thing was the {treasure} of {hero}."),
)


def questions(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield questions about stories, with the fields of public datasets; some have no reasoning or citation."""
    beginning, opening, events, _ = story_grammar().parts
    assert isinstance(events, Repeat)
    for number in range(count):
        draw = random.Random(f"nash-mhc question {seed} {number}").random
        held: Held = {}
        words: list[str] = []
        beginning.sample(draw, held, words)
        opening.sample(draw, held, words)
        facts, later = dict(held), int(draw() * 3)
        for _ in range(later):
            events.body.sample(draw, held, words)
        topic, question, answer, reasoning = _QUESTIONS[int(draw() * len(_QUESTIONS))]
        yield {
            "question": f"{''.join(words)} {question.format(**facts)}",
            "answer": facts[answer],
            "topic": topic,
            "difficulty": ("easy", "medium", "hard")[later],
            "reasoning": reasoning.format(**facts) if draw() < 0.8 else "",
            "case_citation": f"Story {number + 1}" if draw() < 0.3 else "",
        }


def write_questions(out: Path, count: int, seed: int) -> None:
    """Write questions as JSON lines; ConfigError if the file exists or cannot be written."""
    if out.exists():
        raise ConfigError(f"--out {out}: already exists; choose another file, or remove it first")
    with as_config_error(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, "".join(json.dumps(record) + "\n" for record in questions(count, seed)))


class Stories:
    """The first `max_documents` stories as a corpus, for preparing."""

    files: tuple[str, ...] = ("stories",)
    names: tuple[str, ...] = files
    splits: tuple[str, ...] = SPLITS
    format = "text"

    def __init__(self, cfg: DataConfig) -> None:
        self.left_out: dict[str, int] = {}
        if cfg.max_documents is None:
            raise ConfigError("--dataset stories: is endless; say how many to prepare with --max-documents")
        self.total = int(cfg.max_documents * story_grammar().mean_bytes)
        self.content = digest_of(["stories", story(0, SPLITS[0], 0).text])

    def read(self, split: str) -> Iterator[Raw]:
        for number in itertools.count():
            yield Raw.of_table(0, number + 1, story(0, split, number).text)


_LOCK = threading.Lock()  # for threads that read one source: they wait for a volume instead of generating it twice


class StoryRows(RowSource):
    """Endless packed rows of the built-in stories.

    Rows are generated one volume at a time: new stories, packed by best fit, in random order. Each story appears at
    most once (the few that fit in no row are dropped), and whole unless it is longer than a row. If no story is split,
    a perfect model has the mean loss `lowest_loss`; the rest of a split story lacks its opening.
    """

    name, identity = "stories", "stories-2"
    rows_per_volume = 64

    def __init__(self, tokenizer: Tokenizer, *, seed: int, split: str, seq_len: int, align: int = 1) -> None:
        self._tokenizer, self._seed, self._split, self._seq_len, self._align = tokenizer, seed, split, seq_len, align

    @functools.cached_property
    def _volume(self) -> Callable[[int], Rows]:
        return functools.lru_cache(maxsize=4)(self._generate)

    def __getstate__(self) -> dict[str, object]:  # for worker processes
        return {k: v for k, v in self.__dict__.items() if k != "_volume"}

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        rows = []
        for index in indices:
            volume, row = divmod(int(index), self.rows_per_volume)
            with _LOCK:
                rows.append([a[row] for a in self._volume(volume)])
        return Rows(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))

    def _generate(self, volume: int) -> Rows:
        documents, slots = [], 0
        capacity = self.rows_per_volume * self._seq_len
        for number in range(1 << 20):
            # Volumes have disjoint ranges of story numbers: no story is used twice.
            tokens = self._tokenizer.encode(story(self._seed, self._split, (volume << 20) + number).text)
            slots += -(-(len(tokens) + 1) // self._align) * self._align
            if slots > capacity:
                break
            documents.append(tokens)
        rows = pack(
            documents, self._tokenizer.end, self._seq_len, most_rows=self.rows_per_volume, align=self._align,
            begins=self._tokenizer.begin is not None, begin=self._tokenizer.begin,
        )  # fmt: skip
        # Best fit packs the longest stories first; shuffled, the first rows of a volume represent it.
        order = permuted(np.arange(self.rows_per_volume), self.rows_per_volume, combine(self._seed, volume))
        return Rows(*(a[order] for a in rows))
