"""The closed forms of the grammar engine against full enumeration, and the ambiguity check against known cases."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pytest

from nash_mhc.data.stories import (
    Chain,
    Choice,
    Draw,
    Node,
    Recall,
    Repeat,
    Scope,
    Text,
    sample,
)
from tests.ambiguity import find_ambiguity, text_lengths

WORD_LISTS = {
    "names": ("Al", "Beth", "Cy", "Dolores"),
    "colours": ("red", "blue", "grey"),
    "objects": ("cup", "kettle"),
}


def small_grammar() -> Node:
    """Every kind of node: choices of unequal weight, draws without replacement, recalls, a variable count."""
    scope = Scope(WORD_LISTS)
    beginning = Choice([(3, Text("Once")), (1, Text("Long ago"))])
    opening = scope.parse(" {hero=names} had a {colour=colours} {objects}.")
    event = Choice(
        [
            (2, scope.child().parse(" {names} met {names} and {@hero}.")),
            (1, scope.child().parse(" {@hero} saw a {colours} {objects}.")),
        ]
    )
    ending = Choice([(1, scope.child().parse(" So {@hero} kept it.")), (4, scope.child().parse(" All was {@colour}."))])
    return Chain([beginning, opening, Repeat(event, {1: 5, 2: 2}), ending])


def outcomes(node: Node, held: dict[str, str]) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Yield every derivation: its text, its probability and the words held after it."""
    match node:
        case Text():
            yield node.value, 1.0, held
        case Draw():
            remaining = [word for word in node.words if word not in [held[rival] for rival in node.rivals]]
            yield from ((word, 1 / len(remaining), {**held, node.name: word}) for word in remaining)
        case Recall():
            yield held[node.name], 1.0, held
        case Chain():
            yield from outcomes_in_order(node.parts, held)
        case Choice():
            for probability, branch in zip(node.odds.probabilities, node.branches, strict=True):
                yield from ((text, probability * inner, after) for text, inner, after in outcomes(branch, held))
        case Repeat():
            for probability, count in zip(node.odds.probabilities, node.counts, strict=True):
                repeated = outcomes_in_order((node.body,) * count, held)
                yield from ((text, probability * inner, after) for text, inner, after in repeated)


def outcomes_in_order(parts: Sequence[Node], held: dict[str, str]) -> Iterator[tuple[str, float, dict[str, str]]]:
    if not parts:
        yield "", 1.0, held
        return
    for text, probability, between in outcomes(parts[0], held):
        for rest, rest_probability, after in outcomes_in_order(parts[1:], between):
            yield text + rest, probability * rest_probability, after


def enumerate_derivations(root: Node) -> Iterator[tuple[str, float]]:
    return ((text, probability) for text, probability, _ in outcomes(root, {}))


def merged_texts(root: Node) -> dict[str, float]:
    merged: dict[str, float] = defaultdict(float)
    for text, probability in enumerate_derivations(root):
        merged[text] += probability
    return merged


def true_entropy(merged: dict[str, float]) -> float:
    return -math.fsum(p * math.log(p) for p in merged.values())


def test_closed_forms_equal_enumeration() -> None:
    root = small_grammar()
    assert find_ambiguity(root) is None
    merged = merged_texts(root)
    assert len(merged) == sum(1 for _ in enumerate_derivations(root)) > 3000
    assert math.fsum(merged.values()) == pytest.approx(1.0, abs=1e-12)
    assert root.entropy == pytest.approx(true_entropy(merged), rel=0, abs=1e-12)
    assert root.mean_bytes == pytest.approx(math.fsum(p * len(text) for text, p in merged.items()), rel=0, abs=1e-10)
    shortest, longest = text_lengths(root)
    assert all(shortest <= len(text) <= longest for text in merged)


def test_bounds_are_reached_where_draws_do_not_compete() -> None:
    scope = Scope(WORD_LISTS)
    event = Choice([(1, scope.child().parse(" a {colours} {objects},")), (1, Text(" or nothing at all,"))])
    root = Repeat(event, {2: 1, 3: 1})
    lengths = [len(text) for text, _ in enumerate_derivations(root)]
    assert text_lengths(root) == (min(lengths), max(lengths))


def test_sampled_cost_is_the_probability_of_the_text() -> None:
    root = small_grammar()
    merged = merged_texts(root)
    uniform = random.Random(5).random
    for _ in range(2000):
        text, nats = sample(root, uniform)
        assert nats == pytest.approx(-math.log(merged[text]), abs=1e-12)


def test_sampled_frequencies_follow_the_probabilities() -> None:
    scope = Scope(WORD_LISTS)
    branches = [(3, scope.child().parse("{names} and {names}.")), (1, scope.child().parse("A {objects}."))]
    root = Repeat(Choice(branches), {1: 1})
    merged = merged_texts(root)
    uniform = random.Random(11).random
    draws = 20_000
    seen = Counter(sample(root, uniform)[0] for _ in range(draws))
    assert set(seen) == set(merged)
    statistic = sum((seen[text] - draws * p) ** 2 / (draws * p) for text, p in merged.items())
    freedom = len(merged) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_in_scope_differ_and_scopes_end() -> None:
    scope = Scope(WORD_LISTS)
    outer = scope.parse("{first=names} ")
    inner = scope.child().parse("{names} {names} ")
    after = scope.parse("{names}")
    texts = [text.split() for text, _ in enumerate_derivations(Chain([outer, inner, after]))]
    assert all(len(set(words[:3])) == 3 and words[3] != words[0] for words in texts)
    # The child's words are out of scope: the last draw excludes one word, not three.
    assert after.entropy == math.log(3)
    assert any(words[3] in words[1:3] for words in texts)


def parsed(*templates: str) -> Choice:
    return Choice([(1, Scope(WORD_LISTS).parse(template)) for template in templates])


AMBIGUOUS: dict[str, Node] = {
    "the same text in two branches": parsed("the cup.", "the {objects}."),
    "lists that share a word": Choice([(1, Draw(("red", "tin"), "x")), (2, Draw(("tin", "oak"), "y"))]),
    "branches that part and join again": Chain([parsed("{names} ", "Al "), Text("ran.")]),
    "an ending that reads like one more event": Chain(
        [Repeat(Text("He ran. "), {1: 1, 2: 1}), parsed("The end.", "He ran. The end.")]
    ),
    "nested repetitions": Repeat(Repeat(Text("x."), {1: 1, 2: 1}), {1: 1, 2: 1}),
    "words that touch": Chain([Draw(("a", "ab"), "x"), Draw(("bc", "c"), "y"), Text(".")]),
    "numbers that touch": Chain([Draw(("1", "12"), "x"), Draw(("23", "3"), "y"), Text(".")]),
    "lists of words and numbers that touch": Chain([Draw(("1", "a", "ab"), "x"), Draw(("2", "bc", "c"), "y"), Text(".")]),
}


def test_a_number_ends_where_a_word_begins() -> None:
    root = Chain([Draw(("1", "12"), "x"), Draw(("km", "m"), "y")])
    assert find_ambiguity(root) is None
    assert true_entropy(merged_texts(root)) == pytest.approx(root.entropy)


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_ambiguous_grammars_are_found(kind: str) -> None:
    root = AMBIGUOUS[kind]
    assert find_ambiguity(root) is not None
    # These are ambiguous in fact, not only by the check: the closed form overstates the entropy of their text.
    assert true_entropy(merged_texts(root)) < root.entropy - 1e-3


def random_node(chooser: random.Random, depth: int) -> Node:
    kind = chooser.randrange(5 if depth else 2)
    if kind == 0:
        return Text(chooser.choice(["red ", "cup ", ". ", "Al. ", " "]))
    if kind == 1:
        return Scope(WORD_LISTS).parse(chooser.choice(["{colours} ", "{objects} ", "{names}. ", "{names} {names} "]))
    if kind == 2:
        return Chain(random_node(chooser, depth - 1) for _ in range(2))
    if kind == 3:
        return Choice((chooser.randint(1, 3), random_node(chooser, depth - 1)) for _ in range(2))
    return Repeat(random_node(chooser, depth - 1), {1: 1, 2: 1})


def test_no_ambiguity_escapes_the_check() -> None:
    chooser = random.Random(3)
    verdicts: Counter[bool] = Counter()
    for _ in range(600):
        root = random_node(chooser, 3)
        if root.entropy > 6:  # too many texts to list quickly
            continue
        passed = find_ambiguity(root) is None
        verdicts[passed] += 1
        if passed:
            merged = merged_texts(root)
            assert root.entropy == pytest.approx(true_entropy(merged), rel=0, abs=1e-9)
    assert min(verdicts[True], verdicts[False]) > 50


def test_templates_refuse_what_is_not_in_scope() -> None:
    with pytest.raises(KeyError):
        Scope(WORD_LISTS).parse("{@hero} ran.")
    with pytest.raises(ValueError, match="already drawn"):
        Scope(WORD_LISTS).parse("{hero=names} {hero=names}")
    with pytest.raises(ValueError, match="too short"):
        Scope(WORD_LISTS).parse("{objects} {objects} {objects}")
