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
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.files import Corpus
from nash_mhc.data.documents.records import Raw
from nash_mhc.data.order import combine, permuted
from nash_mhc.data.pack import Piece, Rows, RowSource, pack_pieces, split_document, unpack
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import digest_of, write_atomic

# --- the grammar ------------------------------------------------------------------------------------------------------
#
#
# A grammar is a tree of nodes; each node computes its entropy and expected length when it is built. The closed forms
# are exact because no cost depends on a drawn value:
#   * a draw is uniform over its list minus the words that earlier draws of the same list hold in scope; their number is
#     fixed by the grammar, so a draw always costs ln(list size - words held);
#   * drawing without replacement leaves each single draw uniform over the whole list (exchangeability), so the expected
#     length of a draw, and of its recall, is the mean over the list;
#   * branches and counts are chosen independently of everything before them.
# So entropies and lengths add up. The entropy of the choices is the entropy of the text only if no text has two
# derivations; tests/ambiguity.py checks that.

Held = dict[str, str]
UniformSource = Callable[[], float]

_FIELD = re.compile(r"\{(?:@(?P<recall>\w+)|(?:(?P<name>\w+)=)?(?P<list>\w+))\}")


class Distribution:
    """Probabilities from integer weights; the table repeats each index by its weight, so sampling is one lookup."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.table = [index for index, weight in enumerate(weights) for _ in range(weight)]
        self.probabilities = [weight / len(self.table) for weight in weights]
        self.costs = [-math.log(p) for p in self.probabilities]
        self.entropy = self.mean(self.costs)

    def mean(self, values: Iterable[int | float]) -> float:
        return math.fsum(p * value for p, value in zip(self.probabilities, values, strict=True))


class Node(ABC):
    """A node of a grammar."""

    entropy: float = 0.0
    mean_bytes: float

    @abstractmethod
    def sample(self, uniform: UniformSource, held: Held, out: list[str]) -> float:
        """Append one random text to `out` and return its cost, -ln p, in nats."""


class Text(Node):
    def __init__(self, value: str) -> None:
        self.value = value
        self.mean_bytes = float(len(value))

    def sample(self, uniform: UniformSource, held: Held, out: list[str]) -> float:
        out.append(self.value)
        return 0.0


class Recall(Node):
    """Repeat the word that was drawn under `name`; it costs nothing."""

    def __init__(self, words: tuple[str, ...], name: str) -> None:
        self.words, self.name = words, name
        self.mean_bytes = sum(map(len, self.words)) / len(self.words)

    def sample(self, uniform: UniformSource, held: Held, out: list[str]) -> float:
        out.append(held[self.name])
        return 0.0


class Draw(Recall):
    """Draw a uniform word and remember it as `name`; it differs from the words of `rivals`, earlier draws."""

    def __init__(self, words: tuple[str, ...], name: str, rivals: Sequence[str] = ()) -> None:
        super().__init__(words, name)
        self.rivals = tuple(rivals)
        remaining = len(self.words) - len(self.rivals)
        if remaining < 1:
            raise ValueError(f"a list of {len(words)} words is too short for {len(self.rivals) + 1} distinct draws")
        self.entropy = math.log(remaining)

    def sample(self, uniform: UniformSource, held: Held, out: list[str]) -> float:
        words = self.words
        word = words[int(uniform() * len(words))]
        if self.rivals:
            # Rejection sampling, cheap because lists are long.
            taken = [held[rival] for rival in self.rivals]
            while word in taken:
                word = words[int(uniform() * len(words))]
        held[self.name] = word
        out.append(word)
        return self.entropy


class Chain(Node):
    """Parts in sequence."""

    def __init__(self, parts: Iterable[Node]) -> None:
        self.parts = tuple(parts)
        self.entropy = math.fsum(part.entropy for part in self.parts)
        self.mean_bytes = math.fsum(part.mean_bytes for part in self.parts)

    def sample(self, uniform: UniformSource, held: Held, out: list[str]) -> float:
        nats = 0.0
        for part in self.parts:
            nats += part.sample(uniform, held, out)
        return nats


class Choice(Node):
    """One of several branches, with integer weights."""

    def __init__(self, branches: Iterable[tuple[int, Node]]) -> None:
        weights, self.branches = zip(*branches, strict=True)
        self.odds = Distribution(weights)
        self.entropy = self.odds.entropy + self.odds.mean(branch.entropy for branch in self.branches)
        self.mean_bytes = self.odds.mean(branch.mean_bytes for branch in self.branches)

    def sample(self, uniform: UniformSource, held: Held, out: list[str]) -> float:
        odds = self.odds
        taken = odds.table[int(uniform() * len(odds.table))]
        nats: float = self.branches[taken].sample(uniform, held, out)
        return nats + odds.costs[taken]


class Repeat(Node):
    """Independent repetitions of a body; `counts` maps each possible count (at least 1) to an integer weight."""

    def __init__(self, body: Node, counts: Mapping[int, int]) -> None:
        self.body = body
        self.counts = tuple(counts)
        self.odds = Distribution(tuple(counts.values()))
        mean_count = self.odds.mean(self.counts)
        self.entropy = self.odds.entropy + mean_count * body.entropy
        self.mean_bytes = mean_count * body.mean_bytes

    def sample(self, uniform: UniformSource, held: Held, out: list[str]) -> float:
        odds = self.odds
        taken = odds.table[int(uniform() * len(odds.table))]
        nats = odds.costs[taken]
        for _ in range(self.counts[taken]):
            nats += self.body.sample(uniform, held, out)
        return nats


class Scope:
    """Parse templates and track which draws are visible.

    `{list}` draws from a word list, `{name=list}` draws and remembers, `{@name}` recalls. Parse templates in the order
    of the text. Parse each branch of a choice and each body of a repetition in a separate `child()`: its draws then go
    out of scope, and the number of held words never depends on chance.
    """

    def __init__(self, word_lists: Mapping[str, tuple[str, ...]], visible: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._word_lists = word_lists
        self._visible = dict(visible or {})

    def child(self) -> Scope:
        return Scope(self._word_lists, self._visible)

    def parse(self, template: str) -> Chain:
        parts: list[Node] = []
        end = 0
        for field in _FIELD.finditer(template):
            if field.start() > end:
                parts.append(Text(template[end : field.start()]))
            recalled = field["recall"]
            parts.append(Recall(self._visible[recalled], recalled) if recalled else self._draw(field))
            end = field.end()
        if end < len(template):
            parts.append(Text(template[end:]))
        return Chain(parts)

    def _draw(self, field: re.Match[str]) -> Draw:
        word_list = self._word_lists[field["list"]]
        name = field["name"] or f"#{len(self._visible)}"
        if name in self._visible:
            raise ValueError(f"{name!r} is already drawn in this scope")
        rivals = [other for other, other_list in self._visible.items() if other_list is word_list]
        self._visible[name] = word_list
        return Draw(word_list, name, rivals)


def sample(root: Node, uniform: UniformSource) -> tuple[str, float]:
    """Return one text and its -ln p in nats; `uniform` returns floats in [0, 1)."""
    out: list[str] = []
    nats = root.sample(uniform, {}, out)
    return "".join(out), nats


# --- the stories ------------------------------------------------------------------------------------------------------

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
        raise ConfigError(f"split {split!r}: dataset 'stories' has only {' and '.join(SPLITS)}")
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
    ("colour", "What colour was the {treasure}?", "colour", "The {treasure} of {hero} was {colour}."),
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
    """Write questions as JSON lines; raise ConfigError if the file exists or cannot be written."""
    if out.exists():
        raise ConfigError(f"--out {out}: already exists; choose another file, or remove it first")
    with as_config_error(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, "".join(json.dumps(record) + "\n" for record in questions(count, seed)))


class Stories(Corpus):
    """The first `max_documents` stories as a corpus, for preparing."""

    files = names = ("stories",)
    splits: tuple[str, ...] = SPLITS
    format = "text"

    def __init__(self, cfg: DataConfig) -> None:
        if cfg.max_documents is None:
            raise ConfigError("--dataset stories: is endless; set the number of stories to prepare with --max-documents")
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
        pieces: list[Piece] = []
        slots, seq_len, begin, end = 0, self._seq_len, self._tokenizer.begin, self._tokenizer.end
        for number in range(1 << 20):
            # Volumes have disjoint ranges of story numbers: no story is used twice.
            tokens = self._tokenizer.encode(story(self._seed, self._split, (volume << 20) + number).text)
            slots += -(-(len(tokens) + 1) // self._align) * self._align
            if slots > self.rows_per_volume * seq_len:
                break
            pieces += split_document(tokens, end, seq_len, begin=begin)
        rows = unpack(pack_pieces(pieces, end, seq_len, self.rows_per_volume, align=self._align)[0], end)
        # Best fit packs the longest stories first; shuffled, the first rows of a volume represent it.
        order = permuted(np.arange(self.rows_per_volume), self.rows_per_volume, combine(self._seed, volume))
        return Rows(*(a[order] for a in rows))
