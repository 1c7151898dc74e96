"""Render chat templates as transformers does, without importing it, and find which texts of a
conversation they write: those that one drops would not be read."""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
import threading
from collections.abc import Callable, Container, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxvlm.data.errors import DataError
from jaxvlm.data.image_placeholders import Lead
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Turn
from jaxvlm.types import ChatStyle

CLOCK = datetime.datetime(2024, 7, 26)
"""Time that ``strftime_now`` gives a template. Fixed: training data must not depend on the day, or
a run resumed tomorrow would see other tokens (Llama 3 writes the date into its system turn)."""


class TemplateError(DataError):
    """A chat template that can't render these turns; the message is the template's own."""


MAX_STEPS = 200_000
"""Rounds of loops and calls of macros in one rendering; published templates take a few a turn."""
MAX_TEXT = 50_000_000
"""Characters, or items of a list, that a template may build at once."""
_steps = threading.local()


def count_step() -> str:
    """Count a round of a loop or a call of a macro; :class:`_Limited` writes the calls.

    Raises:
        jinja2.TemplateRuntimeError: there were more than :data:`MAX_STEPS`.
    """
    _steps.left -= 1
    if _steps.left < 0:
        raise jinja2.exceptions.TemplateRuntimeError(f"it takes more than {MAX_STEPS} steps")
    return ""


def join_limited(*parts: Any) -> str:
    """Join the operands of ``~``.

    Raises:
        jinja2.TemplateRuntimeError: the result is longer than :data:`MAX_TEXT`.
    """
    text = "".join(map(str, parts))
    _check_size(len(text))
    return text


def _check_size(size: int | float) -> None:
    if size > MAX_TEXT:
        raise jinja2.exceptions.TemplateRuntimeError(f"it builds more than {MAX_TEXT} characters")


class _Limited(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox in which no template runs for ever or fills the memory."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` unless the result is too large."""
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if hasattr(text, "__len__") and isinstance(count, int):
                    _check_size(len(text) * count)
        if operator == "**" and abs(right) > 64:
            _check_size(math.inf)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``obj`` unless an argument is a width or a count that would fill the memory."""
        _check_arguments(*args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        bodies: list[Any] = [*source.find_all(jinja2.nodes.For)]
        for body in [*bodies, *source.find_all(jinja2.nodes.Macro)]:
            step = jinja2.nodes.Call(_imported("count_step"), [], [], None, None)
            body.body.insert(0, jinja2.nodes.ExprStmt(step))
        _limit_joins(source)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)


def _check_arguments(*arguments: Any) -> None:
    for value in arguments:
        if isinstance(value, int):
            _check_size(value)


def _with_checked_arguments(filter_: Callable[..., str]) -> Callable[..., str]:
    def checked(text: str, *args: Any, **kwargs: Any) -> str:
        _check_arguments(*args, *kwargs.values())
        return filter_(text, *args, **kwargs)

    return checked


def _imported(name: str) -> jinja2.nodes.ImportedName:
    return jinja2.nodes.ImportedName(f"{__name__}.{name}")


def _limit_joins(node: jinja2.nodes.Node) -> None:
    """Replace each ``a ~ b`` below ``node`` by a call of :func:`join_limited`."""

    def limited(value: Any) -> Any:
        if isinstance(value, list):
            return [limited(one) for one in value]
        if isinstance(value, jinja2.nodes.Node):
            _limit_joins(value)
        if isinstance(value, jinja2.nodes.Concat):
            return jinja2.nodes.Call(_imported("join_limited"), value.nodes, [], None, None)
        return value

    for name in node.fields:
        setattr(node, name, limited(getattr(node, name)))


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` blocks render as their body: the loss mask doesn't need them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = _Limited(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    for name in ("center", "indent"):
        environment.filters[name] = _with_checked_arguments(environment.filters[name])
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = CLOCK.strftime
    return environment.from_string(template)


def render(
    template: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Render a conversation with a chat template.

    Args:
        template: a chat template in transformers' dialect of jinja2.
        messages: ``{"role": ..., "content": text or list of parts}``.
        add_generation_prompt: end with the header of the assistant's next turn.
        tools: functions that the model may call, as JSON schemas.
        variables: further variables of the template (``bos_token`` ...).

    Returns:
        The conversation as one string.

    Raises:
        TemplateError: the template is broken, refuses these messages, or exceeds a limit.

    Source:
        transformers, utils/chat_template_utils.py (the sandbox and its globals).
    """
    _steps.left = MAX_STEPS
    try:
        return _compile(template).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except _OF_TEMPLATES as error:
        raise TemplateError(str(error) or type(error).__name__) from None


_OF_TEMPLATES = (
    jinja2.TemplateError,
    # Python's, of operations on values; jinja2 raises RuntimeError for an empty cycler.
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    SyntaxError,  # Python compiles the template's code, and nests no more than 20 loops
)
"""Errors of a template; any other is one of jaxvlm or of the machine."""


def with_leads(text: str, style: ChatStyle, image_token: str, leads: Sequence[Lead]) -> str:
    """Write what the model reads for each image and video of a rendered conversation.

    Args:
        text: what the template wrote.
        style: how the family writes images and videos.
        image_token: stands for an image, or a video, in what the model reads.
        leads: what is written around each of them, in order; further ones are images.

    Raises:
        TemplateError: the text has images and videos in another order than ``leads``.
    """
    has_video = bool(style.video) and any(lead.is_video for lead in leads)
    if not style.written and not any(lead != Lead() for lead in leads):
        return text
    written, seen = style.written or image_token, style.seen or image_token
    marks = (style.video, written) if has_video else (written,)
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    if has_video:
        order = [mark == style.video for mark in parts[1::2]]
        if order != [lead.is_video for lead in leads]:
            raise TemplateError("it writes images and videos in another order, or leaves some out")
    for i, mark in enumerate(parts[1::2]):
        lead = leads[i] if i < len(leads) else Lead()
        own = image_token if has_video and mark == style.video else seen
        parts[2 * i + 1] = lead.before + own + lead.behind
    return "".join(parts)


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
            except TemplateError:  # these words: the conversation's own may do
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
