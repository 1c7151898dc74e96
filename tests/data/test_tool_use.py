"""Functions, calls and results: as projects write them, rendered as transformers does, trained."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxvlm.data.conversations import tokenize
from jaxvlm.data.sources.conversation_formats import Record, read
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.sites import partition
from tests.data.conftest import llava

ARGUMENTS = {"city": "Paris", "days": 2}
FUNCTION = {
    "name": "weather",
    "description": "Say how the weather will be.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
AS_TEXT = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
HERMES = """\
{%- if tools %}<|start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|end|>
{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
ASK = {"role": "user", "content": "will it rain in Paris?"}
RESULT = {"role": "tool", "content": "sunny, 20 degrees"}
SAY = {"role": "assistant", "content": "No, it stays sunny."}
WRITTEN = {
    "Hugging Face": {
        "tools": TOOLS,
        "messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}, RESULT, SAY],
    },
    "OpenAI": {
        "tools": TOOLS,
        "messages": [
            ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": AS_TEXT}],
            },
            RESULT,
            SAY,
        ],
    },
    "ms-swift": {
        "tools": json.dumps([FUNCTION]),
        "messages": [
            ASK,
            {"role": "tool_call", "content": json.dumps(CALL["function"])},
            {"role": "tool_response", "content": RESULT["content"]},
            SAY,
        ],
    },
    "LLaMA-Factory": {
        "tools": json.dumps([FUNCTION]),
        "conversations": [
            {"from": "human", "value": ASK["content"]},
            {"from": "function_call", "value": json.dumps(AS_TEXT)},
            {"from": "observation", "value": RESULT["content"]},
            {"from": "gpt", "value": SAY["content"]},
        ],
    },
}


@pytest.fixture(scope="module")
def made():
    """``made(template)``: a tokenizer with that chat template, whose words are letters."""
    plain = chat_tokenizer.build(["any"], "bpe", 600)
    plain.backend.add_special_tokens(["<|start|>", "<|end|>"])

    def make(template=HERMES):
        special = plain.special | {"eos_token": "<|end|>"}
        return chat_tokenizer.ChatTokenizer(plain.backend, template, special)

    return make


def one(write_json, item):
    records, problems = read(write_json([{"id": "x"} | item]))
    assert not problems, problems
    return records[0]


def encoded(record, tokenizer):
    corpus, problems = tokenize.encode([record], tokenizer, 4)
    return corpus, [f"{p.reason}: {p.detail}" for p in problems]


@pytest.mark.parametrize("project", WRITTEN)
def test_each_projects_way_is_rendered_as_transformers_renders(project, write_json, made):
    record = one(write_json, WRITTEN[project])
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, SAY]
    (wanted,), _ = render_jinja_template([messages], tools=TOOLS, chat_template=HERMES)
    tokenizer = made()
    assert tokenizer.render(record.turns) == wanted
    corpus, problems = encoded(record, tokenizer)
    assert not problems
    trained = tokenizer.decode(corpus.tokens[corpus.loss], skip_special=False)
    call = json.dumps({"name": "weather", "arguments": ARGUMENTS})
    assert trained == f"<tool_call>\n{call}\n</tool_call><|end|>{SAY['content']}<|end|>"


def test_calls_of_their_own_role_belong_to_the_turn_before(write_json):
    call = {"role": "tool_call", "content": json.dumps(CALL["function"])}
    result = {"role": "tool_response", "content": "sunny"}
    record = one(write_json, {"messages": [ASK, call, call, result, result, SAY]})
    assert [turn.role for turn in record.turns] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert json.loads(record.turns[1].calls) == [CALL, CALL]
    said = {"role": "assistant", "content": "I look it up."}
    record = one(write_json, {"messages": [ASK, said, call, result, SAY]})
    assert record.turns[1].content == said["content"]
    assert json.loads(record.turns[1].calls) == [CALL]
    untrained = one(write_json, {"messages": [ASK, *[call | {"loss": False}] * 2, result, SAY]})
    assert [turn.trained for turn in untrained.turns] == [True, False, True, True]
    for pair in ([call, call | {"loss": False}], [said | {"loss": False}, call]):
        _, (problem,) = read(write_json([{"messages": [ASK, *pair, result, SAY]}]))
        assert "trained otherwise" in problem.reason
    # Two messages of an assistant's are two turns to transformers.
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert len(one(write_json, {"messages": [ASK, message, message, RESULT, SAY]}).turns) == 5


def test_results_stand_in_the_order_of_their_calls(write_json):
    calls = [CALL | {"id": name} for name in ("a", "b", "c")]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in ("c", "a", "b")]
    messages = [ASK, {"role": "assistant", "tool_calls": calls}, *results, SAY]
    record = one(write_json, {"messages": messages})
    assert [turn.content for turn in record.turns[2:5]] == ["a", "b", "c"]
    results[1] |= {"tool_call_id": "z"}
    _, (problem,) = read(write_json([{"messages": messages}]))
    assert problem.reason == "a result of a call that is not before it" and problem.detail == "z"
    item = WRITTEN["OpenAI"] | {"tools": [FUNCTION | {"name": "other"}]}
    _, (problem,) = read(write_json([item]))
    assert problem.reason.startswith("a call of a function that is not in") and problem.detail


def test_a_call_may_be_untrained_and_each_answer_a_record(write_json, made):
    item = json.loads(json.dumps(WRITTEN["Hugging Face"]))
    item["messages"][1]["weight"] = 0
    corpus, problems = encoded(one(write_json, item), made())
    assert not problems
    trained = made().decode(corpus.tokens[corpus.loss], skip_special=False)
    assert trained == f"{SAY['content']}<|end|>"
    parts = tokenize.split_turns([one(write_json, WRITTEN["OpenAI"])], "each")
    assert [part.turns[-1].role for part in parts] == ["assistant"] * 2
    assert all(part.turns[0].tools for part in parts)


def test_ids_and_names_reach_the_template(write_json, made):
    item = json.loads(json.dumps(WRITTEN["OpenAI"]))
    item["messages"][1]["tool_calls"][0]["id"] = "c12345678"
    item["messages"][2] |= {"tool_call_id": "c12345678", "name": "weather"}
    template = HERMES.replace("<tool_call>", "<tool_call>{{ call.id }}").replace(
        "{{ m.content }}", "{{ m.tool_call_id }}{{ m.name }}{{ m.content }}"
    )
    text = made(template).render(one(write_json, item).turns)
    assert "<tool_call>c12345678\n" in text and "c12345678weathersunny" in text


@pytest.mark.parametrize(
    "template, says",
    [
        (HERMES.replace("tools %}", "nothing %}"), "it drops 'weather' of tools"),
        (HERMES.replace("m.tool_calls", "m.calls"), "it drops 'weather' of calls"),
        (HERMES.replace("call.function.arguments |", "[] |"), "it drops 'city' of calls"),
        (
            HERMES.replace(
                "{%- for m in messages %}", "{%- for m in messages if m.role != 'tool' %}"
            ),
            "it drops 'sunny, 20 degrees'",
        ),
    ],
)
def test_what_a_template_leaves_out_is_said(template, says, write_json, made):
    item = json.loads(json.dumps(WRITTEN["OpenAI"]))
    item["messages"][0]["content"] = "ask weather with city Paris"  # they are in the text anyway
    item["messages"][3]["content"] = "sunny, 20 degrees, says weather"
    _, problems = encoded(one(write_json, item), made(template))
    assert len(problems) == 1 and says in problems[0], problems


def test_special_tokens_in_calls_are_refused(write_json, made):
    item = json.loads(json.dumps(WRITTEN["OpenAI"]))
    item["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city": "<|end|>"}'
    _, problems = encoded(one(write_json, item), made())
    assert problems == ["the text contains a special token: <|end|>"]


def _with(call):
    return {"messages": [ASK, {"role": "assistant", "tool_calls": call}, RESULT, SAY]}


@pytest.mark.parametrize(
    "item, reason",
    [
        ({"tools": {"a": 1}, "messages": [ASK, SAY]}, "'tools' is not a list of functions"),
        ({"tools": "[", "messages": [ASK, SAY]}, "a function or a call that is not JSON"),
        ({"tools": "[" * 5000, "messages": [ASK, SAY]}, "a function or a call that is not JSON"),
        ({"tools": [{"name": ""}], "messages": [ASK, SAY]}, "'tools' is not a list of functions"),
        (_with([{"function": {"name": "f", "arguments": "{"}}]), "that is not JSON"),
        (_with([{"function": {"name": "f", "arguments": [1]}}]), "no name or no object"),
        (_with([{"function": {"name": 1}}]), "no name or no object"),
        (_with([{"name": "f", "arguments": {}, "parameters": {}}]), "no name or no object"),
        (_with("weather"), "that is not JSON"),
        (_with([1]), "no name or no object"),
        ({"messages": [ASK, RESULT, SAY]}, "a function's result without a call before it"),
        ({"messages": [ASK, SAY, RESULT, SAY]}, "a function's result without a call before it"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "an assistant turn is empty"),
        ({"messages": [ASK, {"role": "tool_call", "content": ""}]}, "an assistant turn is empty"),
        ({"messages": [ASK | {"tool_calls": [CALL]}, SAY]}, "a field of the turn"),
        ({"messages": [ASK, SAY | {"tool_call_id": "c"}]}, "a field of the turn"),
        (_with([CALL]) | {"functions": [FUNCTION]}, "a field of the record"),
    ],
)
def test_what_is_no_call_is_refused(item, reason, write_json):
    records, (problem,) = read(write_json([{"id": "x"} | item]))
    assert not records and reason in problem.reason, problem


def test_sites_read_what_is_divided(write_json, tmp_path):
    record = one(write_json, WRITTEN["OpenAI"])
    (tmp_path / "site.jsonl").write_bytes(partition.json_lines([record]))
    (again,), problems = read(str(tmp_path / "site.jsonl"))
    assert not problems and again.turns == record.turns


def test_conversations_without_functions_are_as_before(write_json):
    record = one(write_json, llava(image=None, text="hi"))
    assert record == Record("x", record.turns, ()) and not record.turns[0].tools
