"""Probabilistic grammars whose entropy is known exactly.

A grammar is a tree of nodes; each node computes its entropy and expected length when it is built. The closed forms are
exact because no cost depends on a drawn value:
  * a draw is uniform over its list minus the words that earlier draws of the same list hold in scope; their number is
    fixed by the grammar, so a draw always costs ln(list size - words held);
  * drawing without replacement leaves each single draw uniform over the whole list (exchangeability), so the expected
    length of a draw, and of its recall, is the mean over the list;
  * branches and counts are chosen independently of everything before them.
So entropies and lengths add up. The entropy of the choices is the entropy of the text only if no text has two
derivations; tests/ambiguity.py checks that.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

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
