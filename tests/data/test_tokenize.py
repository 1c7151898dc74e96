"""The loss lies on the assistant's turns: against transformers' own mask."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers.processors import ByteLevel, TemplateProcessing

from jaxvlm.config import ConfigError
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.inference import prompts
from tests.data.conftest import record

WITH_MARKS = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
<|start|>assistant
{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}

{% else %}
<|start|>{{ message['role'] }}
{{ message['content'] }}<|end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """(ours, transformers') with a template that marks what the assistant says."""
    from transformers import AutoTokenizer

    base = chat_tokenizer.build(["what color is it? red, blue", "is it a circle"], "bpe", 320)
    base.backend.add_special_tokens(
        [AddedToken(n, normalized=False) for n in ("<|start|>", "<|end|>")]
    )
    special = chat_tokenizer.SPECIAL | {"eos_token": "<|end|>"}
    folder = tmp_path_factory.mktemp("marked")
    chat_tokenizer.ChatTokenizer(base.backend, WITH_MARKS, special).save(folder)
    return chat_tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


texts = st.text("ab<|>?. é世🙂\n", min_size=1, max_size=12)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    system=st.booleans(),
    rounds=st.lists(st.tuples(texts, texts.filter(str.strip)), min_size=1, max_size=3),
)
def test_mask_is_transformers_mask(marked, system, rounds):
    ours, theirs = marked
    turns = [Turn("system", "be brief")] if system else []
    for question, answer in rounds:
        turns += [Turn("user", question), Turn("assistant", answer)]
    want = theirs.apply_chat_template(
        [{"role": t.role, "content": t.content} for t in turns],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    corpus, problems = tokenize.encode([Record("x", tuple(turns), ())], ours, 4)
    assert not problems
    assert corpus.tokens.tolist() == want["input_ids"]
    assert corpus.loss.tolist() == [bool(m) for m in want["assistant_masks"]]


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_loss_is_on_answers_and_their_end(kind):
    ours = chat_tokenizer.build(["what color is it? red yes blue"], kind, 300)
    turns = (
        Turn("user", "<image>what color is it?"),
        Turn("assistant", "red"),
        Turn("user", "blue?"),
        Turn("assistant", "yes blue"),
    )
    corpus, _ = tokenize.encode([Record("x", turns, ("a.png",))], ours, 9)
    said = ours.decode(corpus.tokens[corpus.loss], skip_special=False)
    assert said.replace(" ", "") == "red<eos>yesblue<eos>"
    assert corpus.length[0] == len(corpus.tokens) + 8


def test_equal_words_share_ids_and_nothing_depends_on_it(word_tokenizer):
    records = [record(i, [f"{i % 3}.png"], f"is it a circle {'red ' * (i % 4)}") for i in range(20)]
    records.insert(7, record("blind"))
    corpus, _ = tokenize.encode(records, word_tokenizer, 5)
    assert len(corpus.tokens) < corpus.length.sum()
    for i, one in enumerate(records):
        alone, _ = tokenize.encode([one], word_tokenizer, 5)
        span = slice(corpus.first[i], corpus.last[i])
        np.testing.assert_array_equal(corpus.tokens[span], alone.tokens)
        np.testing.assert_array_equal(corpus.loss[span], alone.loss)
        assert corpus.length[i] == alone.length[0]
        assert [corpus.paths[p] for p in corpus.images[i]] == list(one.images)


def test_images_may_differ_in_size(word_tokenizer):
    sizes = {"a.png": 3, "b.png": 7}
    corpus, _ = tokenize.encode(
        [record("x", ["a.png", "b.png", "a.png"])], word_tokenizer, sizes.get
    )
    assert corpus.length[0] == corpus.last[0] - 3 + 3 + 7 + 3


def test_prompt_is_the_beginning_of_the_record(word_tokenizer):
    one = record("x", ["a.png"])
    corpus, _ = tokenize.encode([one], word_tokenizer, 1)
    prompt = tokenize.prompt_ids(one.turns[:1], word_tokenizer)
    np.testing.assert_array_equal(corpus.tokens[: len(prompt)], prompt)
    assert not corpus.loss[: len(prompt)].any()
    assert corpus.loss[len(prompt) :].all()


def test_template_that_thinks_in_the_last_answer_alone(marked):
    ours, _ = marked
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content.strip() }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    ours = chat_tokenizer.ChatTokenizer(ours.backend, template, ours.special)
    turns = [Turn("user", "a"), Turn("assistant", "b "), Turn("user", "a"), Turn("assistant", "c")]
    corpus, problems = tokenize.encode([Record("x", tuple(turns), ())], ours, 4)
    assert not problems
    said = ours.decode(corpus.tokens[corpus.loss], skip_special=False)
    assert said == "b<|end|><think></think>c<|end|>"


REFUSED = {
    "the text contains a special token": ("<eos> red", None),
    "the chat template rejects the conversation": ("red", "{{ raise_exception('no') }}"),
    "the chat template rewrites earlier turns": (
        "red",
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ),
    "the chat template drops or adds images": (
        "red",
        "{% for m in messages %}{{ m.content.replace('<image>', '') }}{% endfor %}",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_template_cannot_do_is_a_problem(reason, word_tokenizer):
    answer, template = REFUSED[reason]
    ours = word_tokenizer
    if template:
        ours = chat_tokenizer.ChatTokenizer(ours.backend, template, ours.special)
    good, bad = record("good"), record("bad", ["a.png"], answer=answer)
    corpus, problems = tokenize.encode([bad] if template else [good, bad], ours, 4)
    assert [(p.id, p.reason) for p in problems] == [("bad", reason)]
    assert len(corpus.first) == (0 if template else 1)


# As LLaVA-1.5's: it walks lists of parts alone, and writes no end after an answer.
PARTS_ALONE = """{% for message in messages %}{{ message['role'].upper() + ': ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}
{%- endfor %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}
{{- part['text'] + ' ' }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


@pytest.fixture(scope="module")
def parts_alone(tmp_path_factory):
    """(ours, transformers' whole processor); the tokenizer begins a text with ``<s>``."""
    import transformers  # slow to import

    base = chat_tokenizer.build(["USER: what color is it? ASSISTANT: red, blue"], "bpe", 330)
    base.backend.add_special_tokens(["<s>"])
    begin = base.backend.token_to_id("<s>")
    base.backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    folder = tmp_path_factory.mktemp("parts")
    special = chat_tokenizer.SPECIAL | {"bos_token": "<s>"}
    chat_tokenizer.ChatTokenizer(base.backend, PARTS_ALONE, special).save(folder)
    theirs = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(),
        transformers.AutoTokenizer.from_pretrained(folder),
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=PARTS_ALONE,
        image_token="<image>",
    )
    return chat_tokenizer.load(folder), theirs


def test_a_template_that_takes_lists_alone_loses_no_text(parts_alone):
    ours, theirs = parts_alone
    said = [("user", "what?"), ("assistant", "red"), ("user", "is it?")]
    messages = [{"role": r, "content": [{"type": "text", "text": x}]} for r, x in said]
    wanted = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=True)
    got = tokenize.prompt_ids([Turn(*said[0])], ours)
    np.testing.assert_array_equal(got, np.asarray(wanted).ravel())
    turns = [Turn(*one) for one in said]
    assert "red" in ours.render(turns) and "is it?" in ours.render(turns)


def test_an_answer_ends_where_the_template_forgets_it(parts_alone):
    ours, _ = parts_alone
    said = [("user", "what?"), ("assistant", "red"), ("user", "is it?"), ("assistant", "blue")]
    turns = tuple(Turn(*one) for one in said)
    corpus, problems = tokenize.encode([Record("x", turns, ())], ours, 4)
    assert not problems and corpus.tokens[0] == ours.backend.token_to_id("<s>")
    trained = ours.decode(corpus.tokens[corpus.loss], skip_special=False)
    assert trained.split() == ["red<eos>", "blue<eos>"]


def test_a_template_that_drops_text_is_a_problem(word_tokenizer):
    silent = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    ours = chat_tokenizer.ChatTokenizer(word_tokenizer.backend, silent, word_tokenizer.special)
    _, problems = tokenize.encode([record("x")], ours, 4)
    assert "drops 'what color is the shape?'" in str(problems[0])


NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LAST_ALONE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if m.role == 'user' or loop.last }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NO_SYSTEM, [("system", "red"), ("user", "is it red?"), ("assistant", "no")]),
        (NO_SYSTEM, [("system", "user"), ("user", "is it red?"), ("assistant", "no")]),
        (NO_SYSTEM, [("system", "is it?"), ("user", "is it?"), ("assistant", "no")]),
        (LAST_ALONE, [("user", "a?"), ("assistant", "a"), ("user", "b?"), ("assistant", "b")]),
        (LAST_ALONE, [("user", "a?"), ("assistant", "b"), ("user", "b?"), ("assistant", "b")]),
    ],
)
def test_dropped_text_that_occurs_elsewhere_is_a_problem(word_tokenizer, template, said):
    """In another turn, or in what the template writes itself."""
    ours = chat_tokenizer.ChatTokenizer(word_tokenizer.backend, template, word_tokenizer.special)
    turns = tuple(Turn(*one) for one in said)
    _, problems = tokenize.encode([Record("x", turns, ())], ours, 4)
    lost = said[0 if template is NO_SYSTEM else 1][1]
    assert [p.id for p in problems] == ["x"] and f"it drops {lost!r}" in problems[0].detail
    kept = turns[1:] if template is NO_SYSTEM else turns[:2]
    assert not tokenize.encode([Record("x", kept, ())], ours, 4)[1]


SYSTEM = "{% if m.role == 'system' %}<|start|>system\n{{ m.content }}<|end|>\n{% endif %}"
USER = "{% if m.role == 'user' %}<|start|>user\n{{ m.content }}<|end|>\n{% endif %}"
HEAD = "<|start|>assistant\n"


def template_of(answer, behind="", before=""):
    """A template with the parts of published ones: each turn's, and what stands around them."""
    turns = f"{SYSTEM}{USER}{{% if m.role == 'assistant' %}}{HEAD}{answer}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}{HEAD}{{% else %}}{behind}{{% endif %}}"
    return f"{before}{{% for m in messages %}}{turns}{{% endfor %}}{prompt}"


WORDS = "{{ m.content }}"
SHAPES = {
    "nothing behind (Llama 3)": template_of(WORDS + "<|end|>"),
    "a line break (Qwen)": template_of(WORDS + "<|end|>{{ '\n' }}"),
    "trimmed words (Gemma)": template_of("{{ m.content | trim }}<|end|>{{ '\n' }}"),
    "spaces around (LLaVA)": template_of(WORDS + " <|end|>  "),
    "text": template_of(WORDS + "<|end|>\nend of turn\n"),
    "text after the last turn": template_of(WORDS + "<|end|>\n", "That was all."),
    "EOS after the last turn (Phi 3)": template_of(WORDS + "<|end|>{{ '\n' }}", "{{ eos_token }}"),
    "another marker": template_of(WORDS + "<|end|><|start|>\n"),
    "thinking in the last answer (Qwen 3)": template_of(
        "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}" + WORDS + "<|end|>{{ '\n' }}"
    ),
    "thinking, and text": template_of(
        "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}" + WORDS + " <|end|>\nover\n"
    ),
    "tools": template_of(
        WORDS + "{% for call in m.tool_calls or [] %}{{ call }}{% endfor %}<|end|>{{ '\n' }}",
        before="{% if tools %}<|start|>tools {{ tools }}<|end|>{% endif %}",
    ),
    "no end token, and text (LLaVA 1.5)": template_of(WORDS + " over "),
}


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("eos", ["<|end|>", "<eos>"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_is_trained_as_it_is_generated(shape, eos, system, marked):
    special = marked[0].special | {"eos_token": eos}
    ours = chat_tokenizer.ChatTokenizer(marked[0].backend, SHAPES[shape], special)
    turns = [Turn("system", "be brief")] if system else []
    turns += [Turn("user", "red?"), Turn("assistant", "blue")]
    turns += [Turn("user", "is it?"), Turn("assistant", "yes it is")]
    corpus, problems = tokenize.encode([Record("x", tuple(turns), ())], ours, 4)
    assert not problems
    end = eos if "no end token" in shape else "<|end|>"
    thought = "<think>\n\n</think>\n\n" if "thinking" in shape else ""
    gap = " " if shape in ("spaces around (LLaVA)", "thinking, and text") else ""
    said = ours.decode(corpus.tokens[corpus.loss], skip_special=False)
    assert said == f"blue{gap}{end}{thought}yes it is{gap}{end}"
    # A model that has learned the record by heart: it writes on until a token stops it.
    prompt = tokenize.prompt_ids(turns[:-1], ours)
    assert corpus.tokens[: len(prompt)].tolist() == prompt.tolist()
    rest = corpus.tokens[len(prompt) :]
    stop = int(np.flatnonzero(np.isin(rest, ours.stop_ids))[0])
    trained = corpus.loss[len(prompt) :]
    assert trained[: stop + 1].all() and not trained[stop + 1 :].any()


JOINS = {  # what the template's header ends with, and how the answer begins
    "a space of the header": (" ", "red"),
    "line breaks of the answer": ("\n", "\n\nred"),
    "a word": ("\nit is", "it is"),
}


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("shape", JOINS)
def test_an_answer_that_joins_its_header_is_refused(shape, trimmed, turn, marked):
    head, answer = JOINS[shape]
    base = chat_tokenizer.build(4 * ["is it red red\n\n\nblue, isit is it"], "bpe", 320)
    base.backend.add_special_tokens(["<|end|>"])
    if trimmed:  # offsets without white space, as of RoBERTa's tokenizers
        base.backend.post_processor = ByteLevel(trim_offsets=True)
    template = (
        "{% for m in messages %}{{ m.role }}:"
        f"{{% if m.role == 'assistant' %}}{{{{ {head!r} }}}}{{% endif %}}{{{{ m.content }}}}<|end|>"
        f"{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{{{ {head!r} }}}}{{% endif %}}"
    )
    special = base.special | {"eos_token": "<|end|>"}
    ours = chat_tokenizer.ChatTokenizer(base.backend, template, special)
    turns = [Turn("user", "red?"), Turn("assistant", "(no")] * turn
    turns += [Turn("user", "is it?"), Turn("assistant", answer)]
    apart = [*turns[:-1], Turn("assistant", "(no")]
    records = [Record("joined", tuple(turns), ()), Record("apart", tuple(apart), ())]
    corpus, problems = tokenize.encode(records, ours, 4)
    assert [p.id for p in problems] == ["joined"]
    assert "first token also holds what precedes it" in problems[0].reason
    prompt = tokenize.prompt_ids(apart[:-1], ours)  # what generate begins with
    assert corpus.tokens[corpus.first[0] :][: len(prompt)].tolist() == prompt.tolist()


def test_an_end_token_that_is_not_special_is_refused_in_text():
    base = chat_tokenizer.build(["what color is it? red, blue"], "bpe", 320)
    base.backend.add_tokens([AddedToken("[END]", normalized=False)])
    special = base.special | {"eos_token": "[END]"}
    template = template_of(WORDS + "[END]\nover\n")
    ours = chat_tokenizer.ChatTokenizer(base.backend, template, special)
    turns = (Turn("user", "red?"), Turn("assistant", "blue[END]red"))
    _, problems = tokenize.encode([Record("x", turns, ())], ours, 4)
    assert [(p.reason, p.detail) for p in problems] == [
        ("the text contains a special token", "[END]")
    ]
    with pytest.raises(ConfigError, match=r"the prompt contains the special token \[END\]"):
        prompts.ids_to_answer([], "red?[END]", ours)  # what `generate` and `eval` tokenize


@pytest.mark.parametrize("rounds", [1, 40])
def test_an_answer_that_is_not_trained_is_read_and_has_no_loss(rounds, word_tokenizer):
    turns = rounds * (
        Turn("user", "is it red?"),
        Turn("assistant", "no", trained=False),
        Turn("user", "is it blue?"),
        Turn("assistant", "yes"),
    )
    both = Record("both", tuple(turn._replace(trained=True) for turn in turns), ())
    corpus, _ = tokenize.encode([both, Record("one", turns, ())], word_tokenizer, 4)
    (all_tokens, all_loss), (tokens, loss) = (
        (corpus.tokens[span], corpus.loss[span])
        for span in map(slice, corpus.first.tolist(), corpus.last.tolist())
    )
    np.testing.assert_array_equal(tokens, all_tokens)
    assert word_tokenizer.decode(all_tokens[all_loss]).split() == rounds * ["no", "yes"]
    assert word_tokenizer.decode(tokens[loss]).split() == rounds * ["yes"]


def test_a_template_that_rewrites_earlier_answers_takes_the_last(marked):
    """As templates of thinking models, which begin the last answer alone with a thought."""
    ours, _ = marked
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n"
        "{{ '<think>' if m.role == 'assistant' and loop.last }}{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n<think>{% endif %}"
    )
    ours = chat_tokenizer.ChatTokenizer(ours.backend, template, ours.special)
    turns = [Turn("user", "a"), Turn("assistant", "bb"), Turn("user", "a"), Turn("assistant", "c")]
    _, problems = tokenize.encode([Record("x", tuple(turns), ())], ours, 4)
    assert [problem.reason for problem in problems] == ["the chat template rewrites earlier turns"]
    turns[1] = turns[1]._replace(trained=False)
    corpus, problems = tokenize.encode([Record("x", tuple(turns), ())], ours, 4)
    assert not problems
    assert ours.decode(corpus.tokens[corpus.loss], skip_special=False) == "c<|end|>"


def test_a_first_token_is_never_trained():
    """No token comes before it that could predict it: of an answer that opens its conversation."""
    built = chat_tokenizer.build(["red yes what"])
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    ours = chat_tokenizer.ChatTokenizer(built.backend, template, built.special)
    turns = (Turn("assistant", "yes red"), Turn("user", "what"), Turn("assistant", "red"))
    corpus, problems = tokenize.encode([Record("x", turns, ())], ours, 1)
    assert not problems
    said = [ours.decode([i], skip_special=False) for i in corpus.tokens.tolist()]
    assert said[0] == "yes" and said[1] == "red"
    trained = [word for word, has_loss in zip(said, corpus.loss) if has_loss]
    assert "yes" not in trained and trained.count("red") == 2
