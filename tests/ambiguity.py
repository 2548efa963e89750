"""Does a grammar have a text with two derivations? Decided from its structure, without listing any text.

Where it has none, the entropy of the choices (data/stories.py) is the entropy of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from nash_mhc.data.stories import Chain, Choice, Node, Recall, Repeat, Text

_TOKEN = re.compile(r"[A-Za-z]+|[0-9]+|[^A-Za-z0-9]")


def find_ambiguity(root: Node) -> str | None:
    """None if every text has exactly one derivation, else an account of what may be read in two ways.

    The check is on a wider grammar, in which a recall may be any word of its list, draws may coincide and a repetition
    may have any count. Derivations of the real grammar are derivations of the wider one too, with the same text, so if
    no text is ambiguous there, none is here. The wider grammar is a finite automaton over words and delimiters.
    """
    automaton = _TokenAutomaton()
    first, last = automaton.trace(root)
    return automaton.complaint or automaton.parallel_paths(first, set(last))


def text_lengths(node: Node) -> tuple[int, int]:
    """Bound the lengths of a grammar's texts."""
    match node:
        case Text():
            return len(node.value), len(node.value)
        case Recall():
            return min(map(len, node.words)), max(map(len, node.words))
        case Chain():
            shortest, longest = zip(*map(text_lengths, node.parts), strict=True)
            return sum(shortest), sum(longest)
        case Choice():
            shortest, longest = zip(*map(text_lengths, node.branches), strict=True)
            return min(shortest), max(longest)
        case Repeat():
            shortest, longest = text_lengths(node.body)
            return min(node.counts) * shortest, max(node.counts) * longest
    raise TypeError(f"unknown node {node!r}")


class _TokenAutomaton:
    """Position automaton: one state per token of the grammar, holding the set of words that may stand there.

    A derivation is a path of positions; two derivations of one text are two different paths that read the same tokens.
    """

    def __init__(self) -> None:
        self.symbols: list[frozenset[str]] = []
        self.following: list[list[int]] = []
        self.complaint: str | None = None

    def trace(self, node: Node) -> tuple[list[int], list[int]]:
        """Add the positions of a node; return those it can begin with and those it can end with."""
        match node:
            case Text():
                return self._in_order([self._position({token}) for token in _TOKEN.findall(node.value)])
            case Recall():
                return self._position(node.words)
            case Chain():
                return self._in_order([self.trace(part) for part in node.parts])
            case Choice():
                ends = [self.trace(branch) for branch in node.branches]
                return [p for first, _ in ends for p in first], [p for _, last in ends for p in last]
            case Repeat():
                first, last = self.trace(node.body)
                self._link(last, first)
                return first, last
        raise TypeError(f"unknown node {node!r}")

    def _position(self, words: Iterable[str]) -> tuple[list[int], list[int]]:
        self.symbols.append(frozenset(words))
        self.following.append([])
        return [len(self.symbols) - 1], [len(self.symbols) - 1]

    def _in_order(self, pieces: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
        for (_, last), (first, _) in pairwise(pieces):
            self._link(last, first)
        return pieces[0][0], pieces[-1][1]

    def _link(self, before: list[int], after: list[int]) -> None:
        for left in before:
            for right in after:
                for run in (str.isalpha, str.isdigit):
                    touching = [min(filter(run, self.symbols[side]), default=None) for side in (left, right)]
                    if None not in touching:
                        self.complaint = f"no delimiter between words such as {touching[0]!r} and {touching[1]!r}"
                self.following[left].append(right)

    def parallel_paths(self, starts: list[int], ends: set[int]) -> str | None:
        """Follow two paths at once from every point where they can part; they must never end together.

        Paths that join again do end together, and a position listed twice as successor (nested repetitions give two
        ways to go on) is paired with itself.
        """
        pending = [
            (left, right, "")
            for following in [starts, *self.following]
            for index, left in enumerate(following)
            for right in following[index + 1 :]
        ]
        seen: set[tuple[int, int]] = set()
        while pending:
            left, right, text = pending.pop()
            common = self.symbols[left] & self.symbols[right]
            if not common or (left, right) in seen:
                continue
            seen.add((left, right))
            text += min(common)
            if left in ends and right in ends:
                return f"two derivations may read {text!r}"
            pending += [(a, b, text) for a in self.following[left] for b in self.following[right]]
        return None
