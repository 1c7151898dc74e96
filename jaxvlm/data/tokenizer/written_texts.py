"""Which texts of a conversation a chat template writes: those that it drops would not be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from typing import Any

from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Turn
from jaxvlm.data.tokenizer import chat_template

Place = tuple[str, int, int]
"""'content', 'calls' or 'tools'; turn; piece of the content between images, or string in JSON."""


class WrittenTexts:
    """Texts that a template writes, whatever they say.

    Found by words that are nowhere else, once for conversations of one shape: a text that occurs in
    a rendered conversation may be part of another one, or of the template.

    Args:
        render: renders turns; the second argument says whether with a generation prompt.
    """

    def __init__(self, render: Callable[[Sequence[Turn], bool], str]):
        self._render, self._known = render, dict[Any, set[Place]]()

    def __call__(self, turns: Sequence[Turn], add_generation_prompt: bool) -> Container[Place]:
        """Places of the texts that the template writes of such turns."""
        words: dict[Place, str] = {}
        asked = [_probe(i, turn, words) for i, turn in enumerate(turns)]
        shape = add_generation_prompt, tuple(asked)
        if shape not in self._known:
            try:
                text = self._render(asked, add_generation_prompt)
            except chat_template.TemplateError:  # these words: the conversation's own may do
                text = " ".join(words.values())
            self._known[shape] = {place for place, word in words.items() if word in text}
        return self._known[shape]


def strings(kind: str, text: str) -> list[str]:
    """Strings that a template has to write of a turn's calls or tools.

    Args:
        kind: 'calls': names of functions, and names and texts of arguments; 'tools': names.
        text: JSON of :attr:`Turn.calls` or :attr:`Turn.tools`.
    """
    found: list[str] = []

    def note(value: str) -> str:
        found.append(value)
        return value

    for one in json.loads(text) if text else ():
        _mapped(kind, one["function"], note)
    return found


def _probe(i: int, turn: Turn, words: dict[Place, str]) -> Turn:
    """A turn of the same shape with words of its own, which are noted by their places."""
    pieces = []
    for k, piece in enumerate(turn.content.split(PLACEHOLDER)):
        pieces.append(f"q{i}w{k}q" * bool(piece.strip()))
        words["content", i, k] = pieces[-1]
    probed = turn._replace(content=PLACEHOLDER.join(pieces), trained=True)  # one shape for both
    for kind, text in (("calls", turn.calls), ("tools", turn.tools)):
        if not text or turn.role == "tool":
            continue
        count = 0

        def word(value: str, kind: str = kind) -> str:
            nonlocal count
            words[kind, i, count] = made = f"q{i}{kind}{count}q"
            count += 1
            return made

        listed = json.loads(text)
        made = json.dumps([{**x, "function": _mapped(kind, x["function"], word)} for x in listed])
        probed = probed._replace(calls=made) if kind == "calls" else probed._replace(tools=made)
    return probed


def _mapped(kind: str, function: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    mapped = {**function, "name": change(function["name"])}
    if kind == "calls":
        mapped["arguments"] = _each_string(function["arguments"], change)
    return mapped


def _each_string(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {change(key): _each_string(part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [_each_string(part, change) for part in value]
    return change(value) if isinstance(value, str) and value.strip() else value
