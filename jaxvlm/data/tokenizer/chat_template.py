"""Render chat templates as transformers does, without importing it."""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

CLOCK = datetime.datetime(2024, 7, 26)
"""Time that ``strftime_now`` gives a template. Fixed: training data must not depend on the day, or
a run resumed tomorrow would see other tokens (Llama 3 writes the date into its system turn)."""


class TemplateError(ValueError):
    """A chat template that can't render these turns; the message is the template's own."""


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
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = CLOCK.strftime
    return environment.from_string(template)


def render(
    template: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """Render a conversation with a chat template.

    Args:
        template: a chat template in transformers' dialect of jinja2.
        messages: ``{"role": ..., "content": text or list of parts}``.
        add_generation_prompt: end with the header of the assistant's next turn.
        variables: further variables of the template (``bos_token`` ...).

    Returns:
        The conversation as one string.

    Raises:
        TemplateError: the template is broken, or refuses these messages.

    Source:
        transformers, utils/chat_template_utils.py (the sandbox and its globals).
    """
    try:
        return _compile(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (jinja2.exceptions.TemplateError, TypeError) as error:
        raise TemplateError(str(error) or type(error).__name__) from None
