"""Chat tokenizers in Hugging Face's format: trained on the training text, or loaded from a folder.

Only the `tokenizers` library is needed. transformers' AutoTokenizer loads a saved tokenizer and
gives the same ids.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsInt

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxvlm.config import json_text
from jaxvlm.data.errors import DataError
from jaxvlm.data.image_placeholders import Lead
from jaxvlm.data.sources import tool_use
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Turn
from jaxvlm.data.tokenizer import chat_template
from jaxvlm.types import ChatStyle

SPECIAL = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "eos_token": "<eos>",
    "image_token": "<image>",
}
ROLES = ("<system>", "<user>", "<assistant>")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<' + message['role'] + '>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{{- '<image>' if part['type'] == 'image' else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<eos>' if message['role'] == 'assistant' else '' -}}"
    "{%- endfor -%}"
    "{{- '<assistant>' if add_generation_prompt else '' -}}"
)
"""``<user>question<assistant>answer<eos>``: one token per header, and one ends an answer."""

# Image tokens of the model families that jaxvlm reads, for folders that don't name theirs.
_KNOWN_IMAGE_TOKENS = (
    "<image>",
    "<|image_pad|>",
    "<image_soft_token>",
    "<|image|>",
    "<IMG_CONTEXT>",
    "[IMG]",
)


# Roles whose turns a template may mark by a token, and names of tokens that are no text.
_PROBED_ROLES = ("system", "user", "assistant", "tool", "developer")
_NAMES = re.compile(
    r"(bos|eos|unk|sep|pad|cls|mask|boi|eoi)_token|.*(image|video|audio|vision).*_token"
)

_THOUGHT = re.compile(r".*(</think>|\[/THINK\]|◁/think▷)", re.DOTALL)
"""What an answer begins with where the model thinks before it."""
ONE_AT_A_TIME = "data.loss_turns=each or last trains one answer at a time"
"""What to do where a template writes an earlier answer otherwise than a last one."""

PLAIN = ChatStyle()
"""Style of families that write an image as its image token alone."""


class ChatTokenizer:
    """A tokenizer with a chat template and an image token."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: str,
        special: dict[str, str],
        style: ChatStyle = PLAIN,
    ):
        """Wrap a tokenizer of the `tokenizers` library.

        Args:
            backend: the tokenizer; its truncation and padding are disabled.
            template: chat template.
            special: names such as ``eos_token`` -> the token's text; ``image_token`` and
                ``eos_token`` are required.
            style: how the model's family writes images.

        Raises:
            DataError: ``eos_token`` or ``image_token`` is not in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self.style = style
        self.backend, self.template, self.special = backend, template, dict(special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        for name in ("eos_token", "image_token"):
            if self.special.get(name) not in vocabulary:
                raise DataError(
                    f"tokenizer: {name} {self.special.get(name)!r} is not in its vocabulary; "
                    f"name one in tokenizer_config.json"
                )
        self.eos_id: int = vocabulary[self.special["eos_token"]]
        self.image_id: int = vocabulary[self.special["image_token"]]
        self.pad_id: int = vocabulary.get(self.special.get("pad_token", ""), self.eos_id)
        self.unk_id: int = vocabulary.get(self.special.get("unk_token", ""), -1)
        """-1 if the tokenizer has no unknown token."""
        self.vocab_size: int = max(vocabulary.values()) + 1
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_tokens = frozenset(t.content for t in added.values() if t.special)
        self._image_parts = self._supports_image_parts()
        self._video_part = self._find_video_part()
        roles = ("system", "user", "assistant")
        self._list_roles = frozenset(role for role in roles if self._needs_lists(role))
        self._end_token = ""
        self._written = chat_template.WrittenTexts(self._render_turns)
        ends = self._answer_ends()
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self.eos_id, *(ends or [])[:1]]))
        """Ids that end an answer: EOS, and the template's end-of-turn token (Gemma, Qwen)."""
        reserved = self._written_tokens() & self.special_tokens
        reserved |= {self.backend.id_to_token(i) or "" for i in self.stop_ids} - {""}
        self.reserved_tokens = frozenset(reserved - {PLACEHOLDER})
        """Tokens that a text must not contain: it would fake a turn or an image, or end an answer.
        Other special tokens (of grounding, or added by the user) are text."""
        self._skipped = {vocabulary[token] for token in reserved} | {self.image_id}
        if ends == []:
            # LLaVA-1.5's template: an answer would never end.
            self._end_token = self.special["eos_token"]

    def render(
        self,
        turns: Sequence[Turn],
        add_generation_prompt: bool = False,
        leads: Sequence[Lead] = (),
        forgets: bool = False,
    ) -> str:
        """Render turns as one string, each image as one image token.

        Args:
            turns: turns of a conversation; ``<image>`` stands for an image.
            add_generation_prompt: end with the header of the assistant's next turn.
            leads: what is written around each image or video; () are images without anything.
            forgets: whether the template may leave out what the model thought before an answer,
                once other turns follow.

        Raises:
            TemplateError: the template rejects these turns, or drops some of their text.
        """
        text = self._render_turns(turns, add_generation_prompt, leads)
        last = len(turns) if add_generation_prompt else len(turns) - 1
        written = self._written(turns, add_generation_prompt)
        for i, turn in enumerate(turns):
            earlier = turn.role == "assistant" and i < last
            content = _THOUGHT.sub("", turn.content) if earlier and forgets else turn.content
            for k, piece in enumerate(content.split(PLACEHOLDER)):
                if piece.strip() not in text or (
                    piece.strip() and ("content", i, k) not in written
                ):
                    advice = f"; {ONE_AT_A_TIME}" if earlier and not (forgets or turn.calls) else ""
                    raise chat_template.TemplateError(f"it drops {piece.strip()[:60]!r}{advice}")
            for kind, given in (("tools", turn.tools), ("calls", turn.calls)):
                is_said = given and turn.role != "tool"
                for k, string in enumerate(chat_template.strings(kind, given) if is_said else ()):
                    if (kind, i, k) not in written:
                        raise chat_template.TemplateError(f"it drops {string[:60]!r} of {kind}")
        return text

    def _render_turns(
        self, turns: Sequence[Turn], add_generation_prompt: bool, leads: Sequence[Lead] = ()
    ) -> str:
        count = sum(turn.content.count(PLACEHOLDER) for turn in turns)
        leads = [*leads, *[Lead()] * count][:count]
        kinds = iter(leads)
        messages = [
            {"role": t.role, "content": self._content(t, kinds)}
            | (tool_use.of_message(t.role, t.calls) if t.calls else {})
            for t in turns
        ]
        functions = json.loads(turns[0].tools) if turns and turns[0].tools else None
        return self._render(messages, add_generation_prompt, leads, functions)

    def encode_chat(self, text: str) -> list[int]:
        """Tokenize a rendered conversation to ids, see :meth:`encode_chats`."""
        return self.encode_chats([text])[0].ids

    def encode_chats(self, texts: list[str]) -> list[tokenizers.Encoding]:
        """Tokenize rendered conversations to ids and character offsets.

        The BOS token is added if the tokenizer adds one and the template has not written it, as
        transformers' processors do (``ProcessorMixin.apply_chat_template``).
        """
        first = self.special.get("bos_token")
        bare = [not (first and first in text) for text in texts]
        with_bos = iter(self.backend.encode_batch([t for t, b in zip(texts, bare) if b]))
        rest = iter(self.encode_batch([t for t, b in zip(texts, bare) if not b]))
        return [next(with_bos if b else rest) for b in bare]

    def encode(self, text: str) -> list[int]:
        """Tokenize rendered text to ids; no special token is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[tokenizers.Encoding]:
        """Tokenize rendered texts to ids and character offsets; no special token is added."""
        return self.backend.encode_batch(texts, add_special_tokens=False)

    def decode(self, ids: Iterable[SupportsInt], skip_special: bool = True) -> str:
        """Decode token ids to text.

        Args:
            ids: token ids.
            skip_special: omit the image token and :attr:`reserved_tokens`. Other special tokens
                stay: a text may contain them, so they are part of an answer.
        """
        kept = [i for i in map(int, ids) if not (skip_special and i in self._skipped)]
        if not isinstance(self.backend.decoder, decoders.ByteLevel):
            return self.backend.decode(kept, skip_special_tokens=False)
        # An added token stands for itself, but that decoder would take its letters for bytes.
        parts = []
        for is_added, run in itertools.groupby(kept, self._added.__contains__):
            own = list(run)
            parts += (
                [self._added[i] for i in own]
                if is_added
                else [self.backend.decode(own, skip_special_tokens=False)]
            )
        return "".join(parts)

    def save(self, folder: str | pathlib.Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Not by its own save, whose errors do not say what the system refused.
        text = self.backend.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        named = {k: v for k, v in self.special.items() if k != "image_token"}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(1e30),
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": {"image_token": self.special["image_token"]},
            "chat_template": self.template,
            **named,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        leads: Sequence[Lead] = (),
        tools: Any = None,
    ) -> str:
        text = chat_template.render(
            self.template, messages, add_generation_prompt, tools, **self.special
        )
        return chat_template.with_leads(text, self.style, self.special["image_token"], leads)

    def _content(self, turn: Turn, leads: Iterator[Lead] | None = None) -> Any:
        text = turn.content + (self._end_token if turn.role == "assistant" else "")
        if PLACEHOLDER not in text:
            return [{"type": "text", "text": text}] if turn.role in self._list_roles else text
        first, *rest = text.split(PLACEHOLDER)
        video, image = self.style.video, self.style.written or self.special["image_token"]
        is_video = [bool(video) and leads is not None and next(leads).is_video for _ in rest]
        if not self._image_parts:
            marks = [video if x else image for x in is_video]
            return first + "".join(a + b for a, b in zip(marks, rest))
        parts: list[dict[str, str]] = [{"type": "text", "text": first}] if first else []
        for own, piece in zip(is_video, rest):
            parts += [self._video_part if own else {"type": "image"}]
            parts += [{"type": "text", "text": piece}] if piece else []
        return parts

    def _needs_lists(self, role: str) -> bool:
        """Whether the template omits this role's content if it is a string instead of a list."""

        def shown(content: Any) -> bool:
            turns = {"system": [role, "user"], "assistant": ["user", role]}.get(role, [role])
            messages = [{"role": r, "content": content if r == role else "a"} for r in turns]
            try:
                return "probe" in self._render(messages, False)
            except chat_template.TemplateError:
                return False

        return not shown("probe") and shown([{"type": "text", "text": "probe"}])

    def _supports_image_parts(self) -> bool:
        """Whether the template itself writes an image token for ``{"type": "image"}``.

        Multimodal templates do (and may wrap it in start and end tokens, as Qwen-VL's does); with
        text-only ones the image token is inserted into the text.
        """
        probe = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
        try:
            return self._render(probe, False).count(self.special["image_token"]) == 1
        except chat_template.TemplateError:
            return False

    def _find_video_part(self) -> dict[str, str]:
        """The content part for which the template writes the family's text for a video."""
        part, as_text = {"type": "video"}, {"type": "text", "text": self.style.video}
        probe = [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]
        try:
            text = chat_template.render(self.template, probe, False, None, **self.special)
        except chat_template.TemplateError:
            return as_text
        return part if self.style.video and text.count(self.style.video) == 1 else as_text

    def _written_tokens(self) -> set[str]:
        """Tokens that a conversation has without being in its text.

        They are named in the tokenizer's config (EOS, padding, ...), written by the chat template
        (literally, or put together from a role's name), or written for an image.
        """
        texts = [self.template, self.style.written, self.style.seen, self.style.video]
        for role in _PROBED_ROLES:
            turns = {"assistant": ["user", role], "user": [role]}.get(role, [role, "user"])
            said = [Turn(r, f"{PLACEHOLDER}a" if r == "user" else "a") for r in turns]
            messages = [{"role": t.role, "content": self._content(t)} for t in said]
            with contextlib.suppress(chat_template.TemplateError):
                texts.append(self._render(messages, True))
        # One by one: a batch starts threads, for which a process forked later would wait.
        encoded = {self.backend.id_to_token(i) for text in texts for i in self.encode(text)}
        named = {text for name, text in self.special.items() if _NAMES.fullmatch(name)}
        marks = {t for t in self.special_tokens if re.fullmatch(self.style.marks, t)}
        return {token for token in encoded | named | marks if token}

    def _answer_ends(self) -> list[int] | None:
        """Ids of the special tokens that the template writes behind an answer's words.

        The first of them ends the answer: a template may write more after it, such as Phi-3's
        EOS after the last turn. None if the template refuses to render an answer.
        """
        mark = "\u2063"  # in no template; special tokens before the words are no end (<think>)
        try:
            text = self.render([Turn("user", "a"), Turn("assistant", "b" + mark)])
        except chat_template.TemplateError:
            return None
        names = self.special_tokens - {self.special.get("unk_token")} | {self.special["eos_token"]}
        behind = self.encode(text[text.rindex(mark) + 1 :])
        return [i for i in behind if self.backend.id_to_token(i) in names]


def build(texts: Iterable[str], kind: str = "word", vocab_size: int = 8192) -> ChatTokenizer:
    """Train a new tokenizer.

    Args:
        texts: training texts; ``<image>`` in them is ignored.
        kind: ``word`` (lower case, split at spaces and punctuation; words not in ``texts``
            become ``<unk>``) or ``bpe`` (byte-level: every text can be encoded without loss).
        vocab_size: maximum number of tokens, special tokens included.

    Raises:
        DataError: ``kind`` is unknown, or ``vocab_size`` is too small for it.
    """
    special = [*SPECIAL.values(), *ROLES]
    trainer: trainers.Trainer
    how: Any = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
    if kind == "word":
        backend = tokenizers.Tokenizer(models.WordLevel({}, unk_token=SPECIAL["unk_token"]))
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
        backend.pre_tokenizer = pre_tokenizers.Sequence(split)
        least = len(special) + 1
        trainer = trainers.WordLevelTrainer(**how)
    elif kind == "bpe":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        least = len(special) + 256
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**how, initial_alphabet=alphabet)
    else:
        raise DataError(f"tokenizer.kind={kind!r} is unknown; use word or bpe")
    if vocab_size < least:
        raise DataError(
            f"tokenizer.vocab_size={vocab_size} is too small; {kind} needs at least {least}"
        )
    backend.train_from_iterator((t.replace(PLACEHOLDER, " ") for t in texts), trainer)
    return ChatTokenizer(backend, TEMPLATE, SPECIAL)


def load(folder: str | pathlib.Path, style: ChatStyle = PLAIN) -> ChatTokenizer:
    """Load the tokenizer of a Hugging Face folder.

    If the folder names no image token, ``<image>`` is added after its last id; the model's
    embedding table must then have ``vocab_size`` rows.

    Args:
        folder: holds ``tokenizer.json`` and a chat template (``chat_template.jinja``,
            ``chat_template.json``, or inside ``tokenizer_config.json``).
        style: how the model's family writes images.

    Raises:
        DataError: a file is missing or damaged, or there is no chat template.
    """
    folder = pathlib.Path(folder).expanduser()
    backend, config, special = read(folder)
    template = _find_template(folder, config) or style.template
    if not template:
        raise DataError(f"{folder}: no chat template; put one in {folder}/chat_template.jinja")
    special.setdefault("eos_token", "</s>")
    image = _find_image_token(folder, config, special, backend)
    special["image_token"] = image
    if backend.token_to_id(image) is None:
        backend.add_special_tokens([tokenizers.AddedToken(image, normalized=False, special=True)])
    return ChatTokenizer(backend, template, special, style)


def read(
    folder: pathlib.Path,
) -> tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, str]]:
    """Read a folder's tokenizer, its ``tokenizer_config.json``, and its special tokens by name.

    Raises:
        DataError: a file is missing or damaged.
    """
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder}: no tokenizer.json; give a folder with a fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"{folder}/tokenizer.json: can't be read: {error}") from None
    config = _json(folder / "tokenizer_config.json")
    special = {
        name: text
        for source in (_json(folder / "special_tokens_map.json"), config)
        for name, value in source.items()
        if name.endswith("_token") and (text := _text(value))
    }
    return backend, config, special


def _json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json_text.read(path)
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no JSON object; fetch it again")
    return content


def _text(value: Any) -> str:
    """Text of a special token that is given as a string or as an AddedToken."""
    value = value.get("content") if isinstance(value, dict) else value
    # Half of a surrogate pair is no token of any vocabulary, and can't be looked up.
    return value if isinstance(value, str) and not _SURROGATES.search(value) else ""


_SURROGATES = re.compile("[\ud800-\udfff]")


def _find_template(folder: pathlib.Path, config: dict[str, Any]) -> str:
    if (folder / "chat_template.jinja").is_file():
        try:
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{folder}/chat_template.jinja: not UTF-8; fetch it again") from None
    template = _json(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), "")
    return template if isinstance(template, str) else ""


def _find_image_token(
    folder: pathlib.Path,
    config: dict[str, Any],
    special: dict[str, str],
    backend: tokenizers.Tokenizer,
) -> str:
    """Find the image token that the folder names, or a known one, or else ``<image>`` to add."""
    extra = config.get("extra_special_tokens")
    named = [special.get("image_token", "")]
    named += [_text(extra.get("image_token"))] if isinstance(extra, dict) else []
    model = _json(folder / "config.json")
    number = model.get("image_token_id", model.get("image_token_index"))
    if isinstance(number, int) and 0 <= number < 2**32:
        named.append(backend.id_to_token(int(number)) or "")
    for token in [*named, *_KNOWN_IMAGE_TOKENS]:
        if token and backend.token_to_id(token) is not None:
            return token
    return PLACEHOLDER
