"""Special tokens in a text: what the template or an image writes is refused, others train."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
from tokenizers import AddedToken

from jaxvlm.config import ConfigError
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.hf.families import gemma3, idefics3, internvl
from jaxvlm.inference import prompts
from jaxvlm.types import ChatStyle, Span
from tests.data.test_tokenizer import CHATML

QWEN = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision|>", "<|/vision|>", "<|image_pad|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<start_of_image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Its headers are put together from the role: no header stands in the template's text.
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SMOL = (
    "<|im_start|>{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
    "{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GEMMA_MARKS = ("<bos>", "<start_of_turn>", "<end_of_turn>")
IMAGE_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
TILES = ("<fake_token_around_image>", "<global-img>", "<row_1_col_2>", "<row_6_col_6>")


class Case(NamedTuple):
    template: str
    tokens: tuple[str, ...]
    """Special tokens of the tokenizer."""
    refused: tuple[str, ...]
    answer: str
    """An answer with special tokens that train."""
    named: Mapping[str, str] = MappingProxyType({})
    """Tokens by the names of tokenizer_config.json."""
    style: ChatStyle = ChatStyle()


CASES = {
    "qwen": Case(
        CHATML,
        QWEN,
        QWEN[:6],
        "<|object_ref_start|>a cat<|object_ref_end|>: <|box_start|>(1,2)<|box_end|>",
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<|image_pad|>"},
    ),
    "gemma, with places": Case(
        GEMMA,
        (*GEMMA_MARKS, *IMAGE_TOKENS, "<loc0001>", "<loc0123>"),
        (*GEMMA_MARKS, *IMAGE_TOKENS),
        "<loc0001><loc0123> cat ; <loc0123>",
        {"bos_token": "<bos>", "image_token": "<image_soft_token>"},
        gemma3.chat_style({}),
    ),
    "phi, with tokens of the user's": Case(
        PHI,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<größe>", "<框>"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<eos>", "<pad>"),
        "<größe>a cat<框>",
    ),
    "smolvlm": Case(
        SMOL,
        ("<|im_start|>", "<end_of_utterance>", "<point>", *TILES),
        ("<|im_start|>", "<end_of_utterance>", *TILES),
        "the <point>cat<point>",
        style=idefics3.chat_style({}),
    ),
    "internvl": Case(
        SMOL.replace("<image>", "<IMG_CONTEXT>"),
        ("<IMG_CONTEXT>", "<img>", "</img>", "<box>"),
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        "<box>[1, 2]<box> a cat",
        {"image_token": "<IMG_CONTEXT>"},
        internvl.chat_style({}),
    ),
    "ours": Case(
        chat_tokenizer.TEMPLATE,
        ("<box>",),
        ("<user>", "<system>", "<assistant>", "<eos>", "<pad>", "<unk>"),
        "<box>a cat <box>",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(tokenizer, tokens that are refused, an answer that trains)."""
    made = CASES[request.param]
    texts = ["a cat (1,2) [1, 2]; the cat: describe it", "Represent the user's input."]
    base = chat_tokenizer.build(texts, "bpe", 330)
    base.backend.add_special_tokens([AddedToken(t, normalized=False) for t in made.tokens])
    special = base.special | dict(made.named)
    ours = ChatTokenizer(base.backend, made.template, special, made.style)
    return ours, made.refused, made.answer


def test_what_no_one_else_writes_is_text(case):
    ours, _, answer = case
    turns = (Turn("user", f"where is {answer}?"), Turn("assistant", answer))
    corpus, problems = tokenize.encode([Record("x", turns, ())], ours, 4)
    assert not problems
    trained = corpus.tokens[corpus.loss].tolist()
    assert trained[-1] in ours.stop_ids
    assert ours.decode(trained).strip() == answer  # as `generate` returns it
    free = {t for t in ours.special_tokens - ours.reserved_tokens if t in answer}
    assert free
    for token in free:
        assert trained.count(ours.backend.token_to_id(token)) == answer.count(token)
    prompt = prompts.ids_to_answer([], turns[0].content, ours)
    assert corpus.tokens[: len(prompt)].tolist() == prompt.tolist()


def test_what_the_template_or_an_image_writes_is_refused(case):
    ours, refused, _ = case
    for token in refused:
        text = f"a {token}cat"
        for said in ((text, "a cat"), ("a cat", text)):
            turns = (Turn("user", said[0]), Turn("assistant", said[1]))
            _, problems = tokenize.encode([Record("x", turns, ())], ours, 4)
            assert [(p.reason, p.detail) for p in problems] == [
                ("the text contains a special token", token)
            ]
        with pytest.raises(ConfigError, match="contains the special token"):
            prompts.ids_to_answer([], text, ours)


def test_items_of_pairs_follow_the_same_rule(case, prompt_collator):
    ours, refused, answer = case
    collator = prompt_collator._replace(tokenizer=ours)
    items = [Item.of(answer, ""), *(Item.of(f"a {token}", "") for token in refused)]
    _, rejected = collator.encode(items, 256)
    assert rejected == {
        i: ("the text contains a special token", t) for i, t in enumerate(refused, 1)
    }


def test_a_prompt_with_an_image_marker_of_another_format_is_said(word_tokenizer, caplog):
    image = Span.of(word_tokenizer.image_id, 4)
    prompts.ids_to_answer([image], "<image>is <img> red?", word_tokenizer)
    prompts.ids_to_answer([image], "is <image_1> red?", word_tokenizer)
    assert [r.getMessage().split(" is text")[0] for r in caplog.records] == [
        "the prompt's <img>",
        "the prompt's <image_1>",
    ]
    prompts.ids_to_answer([], "what does <img> mean?", word_tokenizer)  # a text alone
    prompts.ids_to_answer([image], "is <image>red?", word_tokenizer)
    assert len(caplog.records) == 2
