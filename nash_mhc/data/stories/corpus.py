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

from nash_mhc.data.stories.grammar import Chain, Choice, Repeat, Scope, Text, sample
from nash_mhc.data.stories.lexicon import WORD_LISTS

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
