"""What GitHub shows of a page and mkdocs would not: formulas, and lists that begin right under a line. For mkdocs.yml.

Formulas become MathML, which browsers show by themselves: no script, nothing fetched.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_ITEM = re.compile(r"([-*]|\d+\.) ")
# What pymdownx.arithmatex leaves, of a formula within a sentence and of one that stands alone.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the page as it was written."""
    lines: list[str] = []
    in_code = in_list = False
    for line in markdown.split("\n"):
        in_code ^= line.startswith("```")
        begins = not in_code and _ITEM.match(line) is not None
        if begins and not in_list and lines and lines[-1].strip():
            lines.append("")
        in_list = begins or (in_list and not in_code and bool(line.strip()))
        lines.append(line)
    return "\n".join(lines)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the page as HTML."""

    def formula(found: re.Match[str]) -> str:
        alone = found[1] == "div"
        mathml = to_mathml(html.unescape(found[2]), alone=alone)
        return f'<div style="overflow-x: auto">{mathml}</div>' if alone else mathml

    return _FORMULA.sub(formula, content)


def to_mathml(latex: str, *, alone: bool) -> str:
    """ValueError for what the converter does not know: it would be shown as it stands."""
    # `aligned` is what GitHub knows, `split` what the converter does; they are the same.
    mathml = convert(latex.strip().replace("{aligned}", "{split}"), display="block" if alone else "inline")
    if re.search(r"\\[a-zA-Z]|>&<", mathml):
        raise ValueError(f"docs/hooks/as_on_github.py cannot write this formula as MathML: {latex}")
    return re.sub(r'columnalign="(\w+)"', r'style="text-align: \1"', mathml)  # as browsers know it
