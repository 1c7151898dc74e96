"""Conversations whose template writes earlier answers otherwise are trained an answer at a time."""

import dataclasses

import pytest
from tokenizers import AddedToken

from jaxvlm.config import ConfigError, DataConfig
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.data.validate import validate

HEAD = "<|start|>{{ m.role }}\n"
LATER = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
# What stands before an answer and in it; and the prompt of an answer.
TEMPLATES = {
    "the prompt opens the thought (Qwen3-Thinking)": (
        "{% if m.role == 'assistant' and loop.last %}<think>\n{{ c }}"
        "{% else %}{{ c.split('</think>')[-1].lstrip('\n') }}{% endif %}",
        "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}",
    ),
    "thoughts of earlier answers are dropped (Qwen3)": (
        "{{ c if loop.last else c.split('</think>')[-1].lstrip('\n') }}",
        LATER,
    ),
    "other brackets (Kimi)": ("{{ c if loop.last else c.split('◁/think▷')[-1] }}", LATER),
    "no thoughts": ("{{ c }}", LATER),
}
THOUGHTS = {
    "the prompt opens the thought (Qwen3-Thinking)": "is it red\n</think>\n\n",
    "thoughts of earlier answers are dropped (Qwen3)": "<think>\nis it red\n</think>\n\n",
    "other brackets (Kimi)": "◁think▷is it red◁/think▷",
    "no thoughts": "",
}


@pytest.fixture(scope="module", params=TEMPLATES)
def thinking(request):
    """(tokenizer, what an answer begins with)."""
    words, prompt = TEMPLATES[request.param]
    base = chat_tokenizer.build(["what color is it? red, blue", "is it a circle"], "bpe", 320)
    base.backend.add_special_tokens(
        [AddedToken(n, normalized=False) for n in ("<|start|>", "<|end|>")]
    )
    template = (
        "{% for m in messages %}{% set c = m.content %}"
        f"{HEAD}{words}<|end|>\n{{% endfor %}}{prompt}"
    )
    special = base.special | {"eos_token": "<|end|>"}
    return ChatTokenizer(base.backend, template, special), THOUGHTS[request.param]


def conversation(thought, rounds=3):
    turns = [Turn("system", "be brief")]
    for i in range(rounds):
        question = f"{'<image>' if i != 1 else ''}what is it, {i}?"
        turns += [Turn("user", question), Turn("assistant", f"{thought}red {i}")]
    return Record("x", (*turns, Turn("user", "and now?")), ("a.png", "b.png"))


def trained(corpus, i):
    part = slice(corpus.first[i], corpus.last[i])
    return corpus.tokens[part], corpus.loss[part]


@pytest.mark.parametrize("kind", ["last", "each"])
def test_each_answer_is_what_the_template_renders_at_its_turn(kind, thinking):
    ours, thought = thinking
    record = conversation(thought)
    records = tokenize.split_turns([record], kind)
    corpus, problems = tokenize.encode(records, ours, 4)
    assert not problems
    answers = [2, 4, 6] if kind == "each" else [6]
    assert [r.id for r in records] == (["x", "x#2", "x#3"] if kind == "each" else ["x"])
    counts = {2: 1, 4: 1, 6: 2}
    for i, end in enumerate(answers):
        turns = record.turns[: end + 1]
        assert records[i].images == record.images[: counts[end]]
        assert [turn[:2] for turn in records[i].turns] == [turn[:2] for turn in turns]
        assert [t.trained for t in records[i].turns if t.role == "assistant"].index(
            True
        ) == end // 2 - 1
        ids, loss = trained(corpus, i)
        prompt = ours.encode_chat(ours.render(turns[:-1], add_generation_prompt=True, forgets=True))
        assert ids.tolist() == ours.encode_chat(ours.render(turns, forgets=True))
        assert ids[: len(prompt)].tolist() == prompt
        said = ours.decode(ids[loss], skip_special=False)
        assert said == f"{thought}red {end // 2 - 1}<|end|>"
        assert ours.decode(ids[len(prompt) :], skip_special=False) == said + "\n"


def test_all_at_once_is_refused_with_the_way_out(thinking):
    ours, thought = thinking
    _, problems = tokenize.encode([conversation(thought)], ours, 4)
    assert bool(problems) == bool(thought)
    for problem in problems:
        assert problem.reason.startswith("the chat template re")
        assert "data.loss_turns=each or last" in problem.detail


def test_a_template_that_drops_the_words_themselves_is_still_refused(thinking):
    ours, _ = thinking
    silent = (
        "{% for m in messages %}{{ m.content if m.role != 'assistant' or loop.last }}{% endfor %}"
    )
    ours = ChatTokenizer(ours.backend, silent, ours.special)
    records = tokenize.split_turns([conversation("<think>a</think>")], "each")
    _, problems = tokenize.encode(records, ours, 4)
    assert [p.id for p in problems] == ["x#2", "x#3"]
    assert "it drops 'red 0'" in problems[0].detail


def test_a_run_and_data_check_split_alike(word_tokenizer, image, write_json):
    image("a.png")
    turns = [
        *({"role": "user", "content": "<image>what color is it"},),
        *({"role": "assistant", "content": "red"}, {"role": "user", "content": "is it a circle"}),
        {"role": "assistant", "content": "no"},
    ]
    path = write_json([{"id": "x", "images": ["a.png"], "messages": turns}])
    for kind, count in (("all", 1), ("last", 1), ("each", 2)):
        config = DataConfig(train=path, batch_size=1, max_length=64, loss_turns=kind)
        dataset = load_dataset(config, word_tokenizer, image_size=8, num_patches=4)
        report = validate(
            path, config, chat_tokenizer=word_tokenizer, prepare=image_files.squares(8)
        )
        assert len(dataset.records) == report.good == report.total == count
        answers = {"all": "red no", "last": "no", "each": "red no"}
        assert word_tokenizer.decode(dataset.corpus.tokens[dataset.corpus.loss]) == answers[kind]
    with pytest.raises(ConfigError, match=r"data\.loss_turns='lats'"):
        load_dataset(
            dataclasses.replace(config, loss_turns="lats"),
            *(word_tokenizer,),
            image_size=8,
            num_patches=4,
        )


def test_an_answer_that_is_not_trained_is_context_alone():
    turns = [Turn(role, f"{i}") for i in range(4) for role in ("user", "assistant")]
    for i in (1, 7):
        turns[i] = turns[i]._replace(trained=False)
    record = Record("x", tuple(turns), ())
    (last,) = tokenize.split_turns([record], "last")
    assert len(last.turns) == 6
    assert [len(one.turns) for one in tokenize.split_turns([record], "each")] == [4, 6]
