"""The story corpus: its exact figures against samples, its guarantees over the whole grammar, its reproducibility."""

import hashlib
import math
import re
import statistics
from itertools import pairwise

import pytest

from nash_mhc.data.stories import (
    WORD_LISTS,
    Chain,
    Choice,
    Draw,
    Node,
    Recall,
    Repeat,
    Story,
    Text,
    lowest_loss,
    story,
    story_grammar,
)
from tests.ambiguity import find_ambiguity, text_lengths

GRAMMAR = story_grammar()
NATS_PER_TOKEN, BITS_PER_BYTE = lowest_loss()

OPENING = re.compile(
    r"(?:Once|Long ago|Last year|In old times) (?P<hero>\w+), (?P<age>\d+), lived in (?P<home>\w+)"
    r" with (?P<friend>\w+), (?P<friend_age>\d+), a (?P<mood>\w+) (?P<pet>\w+) and a (?P<colour>\w+) (?P<treasure>\w+)\."
)
NUMBERS = ("counts", "prices")


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    return [story(7, "train", index) for index in range(4000)]


def leaves(node: Node) -> list[Node]:
    match node:
        case Chain():
            return [leaf for part in node.parts for leaf in leaves(part)]
        case Choice():
            return [leaf for branch in node.branches for leaf in leaves(branch)]
        case Repeat():
            return leaves(node.body)
    return [node]


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def test_no_story_has_two_derivations() -> None:
    assert find_ambiguity(story_grammar()) is None


def test_mean_cost_agrees_with_the_exact_entropy(stories: list[Story]) -> None:
    nats = [each.nats for each in stories]
    assert abs(statistics.fmean(nats) - GRAMMAR.entropy) < 4 * standard_error(nats)
    # The raw cost varies with the number of events, which hides small errors; given the length it hardly varies.
    # With the exact density as slope, what is left over has the same exact mean of zero but a far smaller spread.
    density = GRAMMAR.entropy / GRAMMAR.mean_bytes
    excess = [each.nats - density * len(each.text) for each in stories]
    assert abs(statistics.fmean(excess)) < 4 * standard_error(excess)
    assert standard_error(excess) < 0.3 * standard_error(nats)


def test_mean_length_agrees_with_the_exact_one(stories: list[Story]) -> None:
    lengths = [float(len(each.text)) for each in stories]
    assert abs(statistics.fmean(lengths) - GRAMMAR.mean_bytes) < 4 * standard_error(lengths)


def test_floors_follow_from_entropy_and_length() -> None:
    assert GRAMMAR.entropy / (GRAMMAR.mean_bytes + 1) == NATS_PER_TOKEN
    assert pytest.approx(GRAMMAR.entropy / GRAMMAR.mean_bytes / math.log(2)) == BITS_PER_BYTE
    assert 0.45 <= NATS_PER_TOKEN <= 0.60


def test_lengths(stories: list[Story]) -> None:
    shortest, longest = text_lengths(GRAMMAR)
    assert 200 <= shortest <= longest <= 4000
    lengths = sorted(len(each.text.encode()) for each in stories)
    assert shortest <= lengths[0]
    assert lengths[-1] <= longest
    assert 400 <= GRAMMAR.mean_bytes <= 460
    assert 0.97 <= sum(length < 1000 for length in lengths) / len(lengths) <= 0.995
    assert lengths[-1] > 1800


def test_text_is_plain_ascii(stories: list[Story]) -> None:
    for each in stories:
        assert re.fullmatch(r"[A-Za-z0-9 ,.]+", each.text)
        assert each.text.endswith(".")
        assert "  " not in each.text


def test_ending_needs_the_facts_of_the_opening(stories: list[Story]) -> None:
    recalled = set()
    for each in stories:
        facts = OPENING.match(each.text)
        assert facts
        ending = each.text[:-1].rpartition(". ")[2]
        words = set(re.findall(r"\w+", ending))
        assert {facts[fact] for fact in ("hero", "friend", "colour", "treasure")} <= words
        assert f"{facts['colour']} {facts['treasure']}" in ending
        recalled |= {fact for fact in ("home", "pet") if facts[fact] in words}
    assert recalled == {"home"}


def test_endings_are_nearly_free_for_a_reader_who_remembers() -> None:
    ending = story_grammar().parts[-1]
    assert isinstance(ending, Choice)
    for branch in ending.branches:
        assert {"hero", "friend", "colour", "treasure"} <= {leaf.name for leaf in leaves(branch) if type(leaf) is Recall}
        # Only a price may be new.
        assert all(leaf.words == WORD_LISTS["prices"] for leaf in leaves(branch) if isinstance(leaf, Draw))
    assert ending.entropy / ending.mean_bytes < 0.5 * NATS_PER_TOKEN


def test_events_refer_back_but_are_mostly_fresh() -> None:
    events = next(part.body for part in story_grammar().parts if isinstance(part, Repeat))
    assert isinstance(events, Choice)
    assert 25 <= len(events.branches) <= 40
    names = [[leaf.name for leaf in leaves(event) if type(leaf) is Recall] for event in events.branches]
    assert {name for recalls in names for name in recalls} == {"pet", "colour", "treasure"}
    assert sum(map(bool, names)) <= 3
    assert events.entropy / events.mean_bytes > 0.5


def test_articles_fit_every_word_that_may_follow_them() -> None:
    parts = leaves(story_grammar())
    after_article = [
        word
        for before, node in pairwise(parts)
        if isinstance(before, Text) and re.search(r"\b[Aa] $", before.value) and isinstance(node, Recall | Draw)
        for word in node.words
    ]
    assert set(after_article) == {word for name in ("moods", "traits", "colours") for word in WORD_LISTS[name]}
    assert not [word for word in after_article if word[0] in "aeiou" or word.startswith(("hon", "hour", "heir"))]
    fixed = " ".join(node.value for node in parts if isinstance(node, Text))
    assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n\b", fixed)


def test_numbers_are_followed_by_plurals() -> None:
    parts = leaves(story_grammar())
    descriptions = [WORD_LISTS[name] for name in ("moods", "traits", "colours", "materials")]
    plurals = {name: WORD_LISTS[name] for name in WORD_LISTS if name.startswith("many_")}
    plurals |= {name: WORD_LISTS[name] for name in ("foods", "topics")}
    numbered = 0
    for at, node in enumerate(parts):
        if not (isinstance(node, Draw) and node.words[0].isdigit()):
            continue
        after = (p for p in parts[at + 1 :] if not (isinstance(p, Text) and p.value == " "))
        noun = next(p for p in after if isinstance(p, Text) or p.words not in descriptions)
        if isinstance(noun, Text):
            assert re.match(r"[,.]| (coins|miles|days|times)\b", noun.value), noun.value
        else:
            assert noun.words in plurals.values()
            numbered += 1
    assert numbered > 20
    assert not [word for words in plurals.values() for word in words if not word.endswith(("s", "men"))]
    # Foxs, ponys and birchs are no words.
    assert not [word for words in plurals.values() for word in words if re.search(r"(?:ch|sh|x|s|[^aeiou]y)s$", word)]


def test_no_word_repeats_a_letter_three_times() -> None:
    assert not [word for words in WORD_LISTS.values() for word in words if re.search(r"([a-z])\1\1", word)]


def test_every_word_has_one_role() -> None:
    words = [word for words in WORD_LISTS.values() for word in words]
    assert len(words) == len(set(words))
    plain = [word for name, words in WORD_LISTS.items() if name not in NUMBERS for word in words]
    assert all(word.isalpha() for word in plain)
    assert 1200 <= len(plain) <= 1500
    assert all(word.isdigit() and word[0] != "0" for name in NUMBERS for word in WORD_LISTS[name])
    used = {word for node in leaves(story_grammar()) if isinstance(node, Draw) for word in node.words}
    assert used == set(words)


def test_stories_are_reproducible_and_in_any_order() -> None:
    later = story(3, "train", 1_000_000_007)
    assert story(3, "train", 1_000_000_007) == later
    digest = hashlib.sha256(story(0, "train", 0).text.encode()).hexdigest()
    assert digest == "f8239b4d6f98213ebd5cc01b255d3992bd2d3e00d1724ad1ec99a4e40c98aaed"


def test_seeds_and_splits_give_different_stories() -> None:
    keys = [(seed, split, index) for seed in (0, 1, 11) for split in ("train", "validation") for index in (0, 1, 2, 11)]
    assert len({story(*key).text for key in keys}) == len(keys)
    with pytest.raises(ValueError, match="split"):
        story(0, "test", 0)
