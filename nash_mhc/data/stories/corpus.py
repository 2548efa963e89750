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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.files import Raw
from nash_mhc.data.order import combine, permuted
from nash_mhc.data.pack import Rows, RowsByTake, pack
from nash_mhc.data.stories.grammar import Chain, Choice, Held, Repeat, Scope, Text, WordList, sample
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import digest_of

SPLITS = ("train", "validation")


def _words(text: str) -> list[str]:
    return text.split()


def _compounds(firsts: str, seconds: str) -> list[str]:
    return [first + second for first in firsts.split() for second in seconds.split()]


def _plural(word: str) -> str:
    if word.endswith(("ch", "sh", "s", "x")):
        return word + "es"
    return word[:-1] + "ies" if word.endswith("y") and word[-2] not in "aeiou" else word + "s"


# Each list has one grammatical role and no word is in two lists, so a word identifies its role. Words that may follow
# the article "a" begin with a consonant sound. Long lists are compounds, so that a model that has seen both halves of a
# word can spell it, and minutes of training come near the lowest possible loss.
_MOODS = _words("""
        bold brave bright brisk calm cruel fierce fond glad grand harsh kind loud meek mild neat proud quick
        quiet rude sad sly stern wise""")

_LISTS: dict[str, list[str]] = {
    "names": _compounds("Al Be Da El Ha Ka Li Mi No Ro Sa To", "bo da dor la lin mas na nor ra ric vin zo"),
    "places": _compounds("Ash Bay Cor Dun Elm Fen Hay Mar Nor Oak Sud Wes", "by den don ey gate ham ley mor ow sey ton wyn"),
    "objects": _compounds(
        "bed cat day dew fog gem hen moon pig rain sea sky sun tea", "bag bell can cup drum fan jar key lid pan pot rod"
    ),
    "foods": _compounds("corn egg fig nut oat pea plum rice rye yam", "bars buns dips jams pies rolls stews tarts"),
    "clothes": _compounds("beach fur gym lab lace road ski wet", "bib cap coat gown hat robe shoe sock vest wig"),
    "topics": _compounds("air bog cave fire ice mud storm tree war wood", "ants apes bats gods hogs imps men orcs owls rats"),
    "jobs": _compounds("boat cab cow dock farm hat log net pot shop stone team", "boy girl lad maid"),
    "moods": _MOODS,
    "manners": [mood + "ly" for mood in _MOODS],
    "animals": _words("""
        bear bee bull camel cat cow crab crow donkey dog dove duck fox frog goat gull hare hen horse lamb
        lion mole moth monkey mule newt pig pony rat seal spider snail swan toad wasp whale"""),
    "traits": _words("""
        bent big blunt broken cheap clean cold dull dusty fine flat fresh hard heavy hollow huge large light
        little long lost lucky new plain rare round rusty sharp shiny short small soft tall thick warm"""),
    "colours": _words("""
        black blue bronze brown coral cream golden green grey lemon lilac lime maroon peach pink purple red
        ruby silver tan teal violet white yellow"""),
    "materials": _words("""
        bamboo bone brass cedar chalk clay copper cork cotton flint glass jade linen marble paper pewter
        satin shell silk slate steel tin velvet wax"""),
    "trees": _words("""
        alder aspen birch chestnut elder fir hazel hawthorn elm laurel linden maple palm poplar rowan spruce
        willow yew"""),
    "handled": _words("""
        bought broke built buried carried caught chose cleaned copied counted dropped filled found grabbed
        hid kept lent lifted loved made mended missed moved opened packed painted pulled pushed saved sold
        stole threw touched used wanted washed"""),
    "went": _words("""
        climbed crawled crept danced dashed drifted drove fled flew hiked hopped hurried jumped marched
        raced ran rode rushed sailed skipped strolled swam trotted walked"""),
    "acted": _words("""
        coughed cried dozed fell froze groaned growled grunted hummed knelt laughed moaned played prayed
        rested sang sat sighed slept sneezed stared waited wept yawned"""),
    "feelings": _words("""
        afraid amazed angry ashamed bitter cosy eager empty excited free gloomy guilty happy hopeful hurt
        lonely pleased puzzled ready safe sick sorry tired worried"""),
    "weather": _words("""
        dew drizzle drought dust fog gales hail haze heat ice mist showers sleet smoke thunder storms"""),
    "skills": _words("""
        bake carve cook dance dig dive draw fish fly hunt juggle knit paint plant read ride row sail sew
        sing skate ski swim write"""),
    "counts": [str(number) for number in range(10, 100)],
    "prices": [str(number) for number in range(100, 1000)],
}

# Plurals are lists of their own: no word is built from two draws, which keeps the grammar unambiguous.
_LISTS |= {"many_" + name: [_plural(word) for word in _LISTS[name]] for name in ("objects", "animals", "jobs", "trees")}
del _LISTS["trees"]

WORD_LISTS = {name: WordList(name, words) for name, words in _LISTS.items()}

_BEGINNINGS = ((4, "Once"), (2, "Long ago"), (1, "Last year"), (1, "In old times"))

_OPENING = (
    " {hero=names}, {counts}, lived in {home=places} with {friend=names}, {counts}, a {moods} {pet=animals}"
    " and a {colour=colours} {treasure=objects}."
)

# Events differ in fixed words, or in the lists at the same position; tests check all pairs.
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

# Every ending repeats the names and the treasure of the opening, and adds little.
_TREASURE = "{@colour} {@treasure}"
_ENDINGS = (
    (2, "At last {@hero} gave the " + _TREASURE + " to {@friend}."),
    (1, "In the end {@hero} took {@friend} and the " + _TREASURE + " home to {@home}."),
    (1, "That night {@friend} sold the " + _TREASURE + " to {@hero} for {prices} coins."),
)

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
    beginning = Choice((weight, Text(words)) for weight, words in _BEGINNINGS)
    opening = scope.parse(_OPENING)
    event = Choice((weight, scope.child().parse(" " + template)) for weight, template in _EVENTS)
    ending = Choice((weight, scope.child().parse(" " + template)) for weight, template in _ENDINGS)
    return Chain([beginning, opening, Repeat(event, _BULK_OF_EVENTS | _TAIL_OF_EVENTS), ending])


@dataclass(frozen=True)
class StoryCorpus:
    """Stories by (seed, split, index), with the exact entropy and mean length of their distribution."""

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
        """Lowest possible loss per token for the byte tokenizer, which adds one end token per story."""
        return self.entropy_nats / (self.mean_bytes + 1)

    @property
    def floor_bits_per_byte(self) -> float:
        return self.entropy_nats / math.log(2) / self.mean_bytes

    def story(self, seed: int, split: str, index: int) -> Story:
        if split not in SPLITS:
            raise ConfigError(f"split {split!r}: dataset 'stories' has {' and '.join(SPLITS)}")
        # String seeds are hashed, so neighbouring seeds are unrelated; Python guarantees random() across versions.
        return Story(*sample(self.grammar, random.Random(f"nash-mhc story {seed} {split} {index}").random))


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
    part = out.with_name(f".{out.name}.part")
    with as_config_error(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in questions(count, seed))
        part.rename(out)


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
        self._corpus = StoryCorpus()
        self.total = int(cfg.max_documents * self._corpus.mean_bytes)
        self.content = digest_of(["stories", self._corpus.story(0, SPLITS[0], 0).text])

    def read(self, split: str) -> Iterator[Raw]:
        for number in itertools.count():
            yield Raw.of_table(0, number + 1, self._corpus.story(0, split, number).text)


class StoryRows(RowsByTake):
    """Endless packed rows of the built-in stories.

    Rows are generated one volume at a time: new stories, packed by best fit, in random order. Each story appears at
    most once (the few that fit in no row are dropped), and whole unless it is longer than a row. If no story is split,
    a perfect model has the mean loss `StoryCorpus.floor_nats_per_token`; the rest of a split story lacks its opening.
    """

    endless = True
    name, identity = "stories", "stories-2"
    rows_per_volume = 64

    def __init__(self, tokenizer: Tokenizer, *, seed: int, split: str, seq_len: int, align: int = 1) -> None:
        self._corpus, self._tokenizer = StoryCorpus(), tokenizer
        self._seed, self._split, self._seq_len, self._align = seed, split, seq_len, align
        self.__setstate__({})

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        rows = []
        for index in indices:
            volume, row = divmod(int(index), self.rows_per_volume)
            with self._lock:
                rows.append([a[row] for a in self._volume(volume)])
        return Rows(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))

    def __getstate__(self) -> dict[str, object]:  # for worker processes
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_volume")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()  # grain's reader threads share this object
        self._volume = functools.lru_cache(maxsize=4)(self._generate)

    def _generate(self, volume: int) -> Rows:
        documents, slots = [], 0
        capacity = self.rows_per_volume * self._seq_len
        for number in range(1 << 20):
            # Volumes have disjoint ranges of story numbers: no story is used twice.
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
        # Best fit packs the longest stories first; shuffled, the first rows of a volume represent it.
        order = permuted(np.arange(self.rows_per_volume), self.rows_per_volume, combine(self._seed, volume))
        return Rows(*(a[order] for a in rows))
