"""Questions about stories, with their answers: a small set to learn fine-tuning with, made as it is asked for.

Each asks for a fact that the opening of a story has just told; what happened since is there to be read past.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.stories.corpus import story_grammar
from nash_mhc.data.stories.grammar import Held, Repeat
from nash_mhc.storage.errors import one_line

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
    with one_line(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in questions(count, seed))
        part.rename(out)
