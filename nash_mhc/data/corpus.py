"""The embedded story corpus: endless short stories, reproducible by seed, of exactly known entropy.

A story opens with facts (who, where, which treasure), goes on with a random number of events, and ends on the facts of
its opening. The ending is nearly free for a reader who remembers and expensive for one who does not, so that context
pays; the events are mostly fresh choices, so that the floor stays well above zero. A byte-level model cannot go below
`floor_nats_per_token` on average.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from nash_mhc.data.grammar import Chain, Choice, Repeat, Scope, Text, sample
from nash_mhc.data.lexicon import WORD_LISTS

SPLITS = ("train", "validation")

_BEGINNINGS = ((4, "Once"), (2, "Long ago"), (1, "Last year"), (1, "In old times"))

_OPENING = (
    " {hero=names} the {job=jobs} lived by the {home=places} with {friend=names}, a {mood=moods} {pet=animals}"
    " and a {colour=colours} {material=materials} {treasure=objects}."
)

# Events differ in their fixed words or in the lists that stand at the same point; tests check this over all of them.
_EVENTS = (
    (4, "{@hero} {handled} a {traits} {colours} {objects}."),
    (4, "{names} {handled} a {traits} {objects} for {@hero}."),
    (4, "{names} {handled} {numbers} {foods} and a {materials} {objects}."),
    (3, "With {names}, {@friend} {handled} a {colours} {materials} {objects}."),
    (2, "{@hero} sold {names} a {traits} {objects} and {numbers} {foods}."),
    (3, "{names} sent {names} a {clothes} and a {materials} {objects}."),
    (3, "{names} {went} to the {places} with a {moods} {animals}."),
    (2, "{@hero} {went} {manners} with {names} the {jobs}."),
    (2, "{@friend} {went} after {names} the {moods} {jobs}."),
    (3, "Soon a {moods} {jobs} {went} to {names}."),
    (2, "Amid {weather} and {weather} {names} {went} to {names}."),
    (2, "The {@pet} {acted} {manners} near {names}."),
    (2, "The {@pet} saw {names}, a {moods} {animals} and a {traits} {objects}."),
    (3, "A {moods} {animals} {acted} {manners} near the {places}."),
    (3, "The {moods} {jobs} and {names} {acted} {manners}."),
    (2, "{@friend} fed {numbers} {foods} to a {moods} {animals}."),
    (3, "{names} ate {foods}, {foods} and {foods} with {names}."),
    (2, "{@hero} felt {feelings}, {names} {feelings} and {names} {feelings}."),
    (2, "{names} the {jobs} was {moods} and {feelings}."),
    (2, "{names} wore a {colours} {clothes} and a {materials} {clothes}."),
    (2, "{@hero} drew {names}, a {colours} {animals} and a {traits} {clothes}."),
    (2, "{names} and {names} feared {topics} and {topics}."),
    (3, "A {moods} {jobs} told {names} of {topics}."),
    (1, "After the {weather} {names} was {feelings}."),
    (2, "{names} could {skills}, {skills} and {skills}."),
    (1, "The {@pet} made {names} {skills} and {skills}."),
    (2, "{@friend} saw {names} {skills} {manners} and {skills} {manners}."),
    (3, "By the {places} stood a {traits} {materials} {objects}."),
    (1, "{names} left a {colours} {clothes} under the {trees}."),
    (4, "{names}, {names} and {names} met {names} at the {places}."),
    (1, "{names} asked for the {@colour} {@treasure}."),
)

# Every ending needs the names, the home and the whole treasure of the opening; little in it is new.
_TREASURE = "{@colour} {@material} {@treasure}"
_ENDINGS = (
    (2, "At last {@hero} took the " + _TREASURE + " home to the {@home}, and {@friend} was {feelings}."),
    (2, "In the end {@hero}, {@friend} and the {@mood} {@pet} hid the " + _TREASURE + " by the {@home}."),
    (1, "That night {@friend} left the " + _TREASURE + " by the {@home}, and {@hero} the {@job} {acted}."),
)

# The number of events: a bulk around eight, then weights that fall with the fourth power of the count, which gives a
# thin tail of stories several times as long. The largest count keeps even the longest possible story under 4,000 bytes.
_BULK_OF_EVENTS = {3: 300, 4: 550, 5: 850, 6: 1200, 7: 1500, 8: 1600, 9: 1450, 10: 1200, 11: 900, 12: 600}
_TAIL_OF_EVENTS = {count: round(450 * (12 / count) ** 4) for count in range(13, 61)}


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
