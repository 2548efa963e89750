"""The embedded story corpus: endless short stories, reproducible by seed, of exactly known entropy.

A story opens with facts (who, where, which treasure), goes on with a random number of events, and ends on the facts of
its opening. The ending is nearly free for a reader who remembers and expensive for one who does not, so that context
pays; the events are mostly fresh choices, so that the floor stays well above zero. A byte-level model cannot go below
`floor_nats_per_token` on average. Questions about a story ask for a fact of its opening."""

from __future__ import annotations

import json
import math
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.order import combine, permuted
from nash_mhc.data.pack import Rows, pack
from nash_mhc.data.stories.grammar import Chain, Choice, Held, Repeat, Scope, Text, sample
from nash_mhc.data.stories.lexicon import WORD_LISTS
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.errors import as_config_error

SPLITS = ("train", "validation")

_BEGINNINGS = ((4, "Once"), (2, "Long ago"), (1, "Last year"), (1, "In old times"))

_OPENING = (
    " {hero=names}, {counts}, lived in {home=places} with {friend=names}, {counts}, a {moods} {pet=animals}"
    " and a {colour=colours} {treasure=objects}."
)

# Events differ in their fixed words or in the lists that stand at the same point; tests check this over all of them.
_EVENTS = (
    (4, "{names} {handled} {prices} {foods} and {counts} {many_objects}."),
    (4, "{names} sold {names} {counts} {foods} for {prices} coins."),
    (4, "{names} sent {names} {prices} {many_objects} and {counts} {foods}."),
    (3, "With {names}, {names} {handled} {counts} {colours} {materials} {many_objects}."),
    (3, "{names} {went} {prices} miles to {places} with {counts} {many_animals}."),
    (3, "{names}, {counts}, {went} to {places} with {names}, {counts}."),
    (3, "Soon {counts} {many_jobs} {went} to {names}, {counts}."),
    (2, "They {handled} a {traits} {colours} {objects} for {prices} coins."),
    (2, "They {went} {prices} miles after {names} the {moods} {jobs}."),
    (2, "They fed {counts} {foods} to {counts} {many_animals}."),
    (2, "The {moods} {animals} {acted} {manners} near {names} and {counts} {many_animals}."),
    (2, "{counts} {moods} {many_animals} {acted} {manners} near {places}."),
    (2, "The {jobs} and {names} {acted} {counts} times."),
    (3, "{names} ate {counts} {foods} and {counts} {foods} with {names}."),
    (2, "{names} felt {feelings}, {names} {feelings} and {names} {feelings}."),
    (2, "{names} the {jobs} was {counts}, {moods} and {feelings}."),
    (2, "{names} wore a {colours} {clothes} and {counts} {materials} {many_objects}."),
    (2, "{names} drew {names}, {counts} {colours} {many_animals} and a {traits} {clothes}."),
    (2, "{names} and {names} feared {counts} {topics} and {prices} {topics}."),
    (2, "{counts} {moods} {many_jobs} told {names} of {topics}."),
    (2, "{names} could {skills}, {skills} and {skills} for {counts} days."),
    (1, "The {@pet} saw {names}, {counts} {many_animals} and {counts} {many_objects}."),
    (3, "In {places} stood {counts} {traits} {many_objects}."),
    (1, "After {counts} days of {weather} {names} was {feelings}."),
    (1, "{names} left a {colours} {clothes} under {counts} {many_trees}."),
    (4, "{names}, {names} and {names} met {names} and {counts} {many_jobs} at {places}."),
    (1, "{names} offered {prices} coins for the {@colour} {@treasure}."),
)

# Every ending needs the names and the treasure of the opening; little in it is new.
_TREASURE = "{@colour} {@treasure}"
_ENDINGS = (
    (2, "At last {@hero} gave the " + _TREASURE + " to {@friend}."),
    (1, "In the end {@hero} took {@friend} and the " + _TREASURE + " home to {@home}."),
    (1, "That night {@friend} sold the " + _TREASURE + " to {@hero} for {prices} coins."),
)

# The number of events: a bulk around five, then weights that fall with the fourth power of the count, which gives a
# thin tail of stories several times as long. The largest count keeps even the longest possible story under 4,000 bytes.
_BULK_OF_EVENTS = {3: 900, 4: 1300, 5: 1500, 6: 1400, 7: 1100, 8: 800, 9: 500, 10: 300, 11: 200, 12: 120}
_TAIL_OF_EVENTS = {count: round(110 * (12 / count) ** 4) or 1 for count in range(13, 51)}


class Story(NamedTuple):
    text: str
    nats: float
    """-ln P(text), the number of events and the choice of the ending included."""


@cache
def story_grammar() -> Chain:
    scope = Scope(WORD_LISTS)
    beginning = Choice((weight, Text(words)) for weight, words in _BEGINNINGS)
    opening = scope.parse(_OPENING)
    event = Choice((weight, scope.child().parse(" " + template)) for weight, template in _EVENTS)
    ending = Choice((weight, scope.child().parse(" " + template)) for weight, template in _ENDINGS)
    return Chain([beginning, opening, Repeat(event, _BULK_OF_EVENTS | _TAIL_OF_EVENTS), ending])


@dataclass(frozen=True)
class StoryCorpus:
    """Stories by (seed, split, index), in any order, and the exact figures of their distribution."""

    grammar: Chain = field(default_factory=story_grammar, repr=False)

    @property
    def entropy_nats(self) -> float:
        """Entropy of one story."""
        return self.grammar.entropy

    @property
    def mean_bytes(self) -> float:
        """Expected length of one story."""
        return self.grammar.mean_bytes

    @property
    def floor_nats_per_token(self) -> float:
        """Least possible loss per byte token, one end-of-document token per story included."""
        return self.entropy_nats / (self.mean_bytes + 1)

    @property
    def floor_bits_per_byte(self) -> float:
        return self.entropy_nats / math.log(2) / self.mean_bytes

    def story(self, seed: int, split: str, index: int) -> Story:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
        # A string seed is hashed as a whole, so neighbouring indices and seeds give unrelated streams, and random()
        # of a seeded generator is the one stream that Python promises to keep from version to version.
        return Story(*sample(self.grammar, random.Random(f"nash-mhc story {seed} {split} {index}").random))


# Topic, question, the fact that answers it, and how one knows.
_ASKED = (
    ("place", "Where did {hero} live?", "home", "The story says that {hero} lived in {home}."),
    ("friend", "Who lived with {hero}?", "friend", "The story says that {hero} lived with {friend}."),
    ("animal", "Which animal lived with {hero}?", "pet", "With {hero} there was a {pet}."),
    ("colour", "Which colour had the {treasure}?", "colour", "The {treasure} of {hero} was {colour}."),
    ("treasure", "What was {colour}?", "treasure", "The {colour} thing was the {treasure} of {hero}."),
)


def questions(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Records of the fields that public sets of this kind have; some lack their reasoning or their citation."""
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
        topic, question, answer, reasoning = _ASKED[int(draw() * len(_ASKED))]
        yield {
            "question": f"{''.join(words)} {question.format(**facts)}",
            "answer": facts[answer],
            "topic": topic,
            "difficulty": ("easy", "medium", "hard")[later],
            "reasoning": reasoning.format(**facts) if draw() < 0.8 else "",
            "case_citation": f"Story {number + 1}" if draw() < 0.3 else "",
        }


def write_questions(out: Path, count: int, seed: int) -> None:
    """A JSON object a line; the file appears when it is whole. ConfigError."""
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; choose another file, or remove it first")
    part = out.with_name(f".{out.name}.part")
    with as_config_error(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in questions(count, seed))
        part.rename(out)


class StoryRows:
    """Endless packed rows of the embedded stories.

    Rows are made a volume at a time: fresh stories, best fit, little padding, in random order. Every story appears at
    most once (the few that fit nowhere are left out) and whole, unless it is longer than a row. Where none is, the mean
    loss of a perfect model is the corpus's own floor;
    the rest of a story that was cut has lost its opening and costs more.
    """

    endless = True
    most_documents: int | None = None
    room: int | None = None
    name, identity, held_out = "stories", "stories-2", ""
    rows_per_volume = 64

    def __init__(self, tokenizer: Tokenizer, *, seed: int, split: str, seq_len: int, align: int = 1) -> None:
        self._corpus, self._tokenizer = StoryCorpus(), tokenizer
        self._seed, self._split, self._seq_len, self._align = seed, split, seq_len, align
        self._volumes: OrderedDict[int, Rows] = OrderedDict()
        self._lock = threading.Lock()  # grain's reader threads share this source

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Rows:
        volume, row = divmod(int(index), self.rows_per_volume)
        with self._lock:
            if volume not in self._volumes:
                self._volumes[volume] = self._make(volume)
            self._volumes.move_to_end(volume)
            rows = self._volumes[volume]
            while len(self._volumes) > 4:
                self._volumes.popitem(last=False)
        return Rows(*(a[row] for a in rows))

    def epochs(self, position: int) -> dict[str, float]:
        return {}

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        return Rows(*(np.stack(a) for a in zip(*(self[int(i)] for i in indices), strict=True)))

    def __getstate__(self) -> dict[str, object]:  # worker processes get the recipe, not the lock
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_volumes")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _volumes=OrderedDict())

    def _make(self, volume: int) -> Rows:
        documents, slots = [], 0
        capacity = self.rows_per_volume * self._seq_len
        for number in range(1 << 20):
            # One number a story, volumes far apart: no story is ever used twice.
            story = self._corpus.story(self._seed, self._split, (volume << 20) + number)
            tokens = self._tokenizer.encode(story.text)
            slots += -(-(len(tokens) + 1) // self._align) * self._align
            if slots > capacity:
                break
            documents.append(tokens)
        rows = pack(
            documents, self._tokenizer.end, self._seq_len, most_rows=self.rows_per_volume, align=self._align,
            begins=self._tokenizer.begin is not None, begin=self._tokenizer.begin,
        )  # fmt: skip
        # Best fit lays the longest first: in that order, the first rows of a volume would be no sample of it.
        order = permuted(np.arange(self.rows_per_volume), self.rows_per_volume, combine(self._seed, volume))
        return Rows(*(a[order] for a in rows))
