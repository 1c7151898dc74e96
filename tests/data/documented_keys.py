"""The keys that other projects document for their training data, and what becomes of each here.

They were taken by hand from each project's own documentation, at the commit that is named.
``python -m tests.data.documented_keys`` prints the table of docs/data.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.sources.conversation_formats import Record

LEVELS = ("record", "turn", "part")


class Key(NamedTuple):
    """A documented key, in a record that is good but for it."""

    level: str
    """record | turn | part, the last with what is inside of a part."""
    name: str
    record: dict[str, Any]
    read: str
    """What is read of the record, as :func:`shown` writes it; "" if it is refused by the key."""


class Project(NamedTuple):
    """A project, and the keys that its documentation names."""

    name: str
    source: str
    """Repository, commit and files."""
    keys: list[Key]


def shown(record: Record | Example) -> str:
    """All that was read of a record; an assistant's turn that is not trained is ``(assistant)``."""
    if isinstance(record, Record):
        turns = [(t.role if t.trained else f"({t.role})", t.content) for t in record.turns]
        said = [f"{role}: {content}" for role, content in turns]
        said = [
            x + " calls f" * bool(turn.calls and turn.role == "assistant")
            for x, turn in zip(said, record.turns, strict=True)
        ]
        said = ["tools f"] * bool(record.turns[0].tools) + said
        return " | ".join([*said, *(path.rpartition("/")[2] for path in record.images)])
    parts = [f"+ {_item(record.positive)}", *(f"- {_item(item)}" for item in record.negatives)]
    parts += [f"scores {' '.join(f'{x:g}' for x in record.scores)}"] if record.scores else []
    parts += [f"label {record.label}"] if record.label else []
    return " | ".join([_item(record.query), *parts])


def _item(item: Item) -> str:
    return f"{item.instruction and f'[{item.instruction}] '}{item.text}{_file(item.image)}"


def _file(image: str) -> str:
    return f" {image.rpartition('/')[2]}" if image else ""


ASKED = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}
SAID = "user: hi | assistant: yes"
SEEN = "user: <image>hi | assistant: yes | a.png"
PLAYED = "user: <image>hi | assistant: yes | a.mp4::video"
BEFORE, BRIEF = "user: a | assistant: b", "system: be brief"
TEXT = {"type": "text", "text": "hi"}
CALL = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
FROM = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]


def chat(**more: Any) -> dict[str, Any]:
    """A record of messages with further fields."""
    return {"messages": [ASKED, ANSWER], **more}


def answer(**more: Any) -> dict[str, Any]:
    """A record whose answer has further fields; an answer that is trained stands before it."""
    return {"messages": [ASKED, ANSWER, ASKED, ANSWER | more]}


def question(**more: Any) -> dict[str, Any]:
    """A record whose question has further fields."""
    return {"messages": [ASKED | more, ANSWER]}


def parts(*content: Any, **more: Any) -> dict[str, Any]:
    """A record whose question is a list of parts."""
    return {"messages": [{"role": "user", "content": list(content)}, ANSWER], **more}


def image(**more: Any) -> dict[str, Any]:
    """A record with a part that is an image with these fields."""
    return parts({"type": "image"} | more, TEXT)


def answered(**more: Any) -> dict[str, Any]:
    """A record whose answer is a part with these fields."""
    return {"messages": [ASKED, {"role": "assistant", "content": [TEXT | more]}]}


def llava(**more: Any) -> dict[str, Any]:
    """A record of LLaVA's turns with further fields."""
    return {"conversations": FROM, **more}


def llava_answer(**more: Any) -> dict[str, Any]:
    """A record of LLaVA's turns whose last answer has further fields."""
    return {"conversations": [*FROM, FROM[0], FROM[1] | more]}


def pair(**more: Any) -> dict[str, Any]:
    """A pair of a query and a positive with further fields."""
    return {"query": "hi", "positive": "yes", **more}


def swift(**more: Any) -> dict[str, Any]:
    """A pair of messages with further fields."""
    return {
        "messages": [ASKED],
        "positive_messages": [[{"role": "user", "content": "yes"}]],
        **more,
    }


def flag(**more: Any) -> dict[str, Any]:
    """A pair in FlagEmbedding's fields with further ones."""
    return {"query": "hi", "pos": ["yes"], "neg": ["no"], **more}


def refused(level: str, make: Any, **fields: Any) -> list[Key]:
    """One key each: a record that ``make`` makes with that field alone is refused by its name."""
    return [Key(level, name, make(**{name: value}), "") for name, value in fields.items()]


def instruct(**more: Any) -> dict[str, Any]:
    """A record of Alpaca's fields with further ones."""
    return {"instruction": "hi", "output": "yes", **more}


def vqa(**more: Any) -> dict[str, Any]:
    """A question and its answer with further fields."""
    return {"question": "hi", "answer": "yes", **more}


def every(record: dict[str, Any], read: str) -> list[Key]:
    """Every key of a record that is read."""
    return [Key("record", name, record, read) for name in record]


def whole(*records: dict[str, Any]) -> list[Key]:
    """Every key of records in a format that is not read."""
    return [Key("record", name, record, "") for record in records for name in record]


_PAIR = "hi | + yes | scores"
TWICE = f"{SAID} | {SAID}"
UNTRAINED = f"{SAID} | user: hi | (assistant): yes"

MS_SWIFT = Project(
    "ms-swift",
    "modelscope/ms-swift at 3602360a5623, docs/source_en/Customization/Custom-dataset.md and "
    "BestPractices/Embedding.md, Reranker.md",
    [
        Key("record", "messages", chat(), SAID),
        Key("record", "images", chat(images=["a.png"]), SEEN),
        Key("record", "image", chat(image="a.png"), SEEN),
        Key("record", "videos", chat(videos=["a.mp4"]), PLAYED),
        Key("record", "video", chat(video="a.mp4"), PLAYED),
        *refused("record", chat, audios=["a.wav"], audio="a.wav"),
        Key("record", "tools", chat(tools='[{"name": "f"}]'), f"tools f | {SAID}"),
        *refused("record", chat, label=True, channel="math"),
        *refused("record", chat, objects={"ref": ["dog"], "bbox": [[1, 2, 3, 4]], "image_id": [0]}),
        *refused("record", chat, rejected_response="no", rejected_messages=[ASKED, ANSWER]),
        *refused("record", chat, rejected_images=["a.png"], solution="4"),
        *refused("record", chat, chat_template_kwargs={"max_pixels": 1048576}),
        *whole({"system": "be brief", "conversation": [{"human": "hi", "assistant": "yes"}]}),
        *every({"query": "hi", "response": "yes", "history": [["a", "b"]]}, f"{BEFORE} | {SAID}"),
        *every(instruct(input="a"), "user: hi\na | assistant: yes"),
        Key("turn", "role", chat(), SAID),
        Key("turn", "content", chat(), SAID),
        Key("turn", "loss", answer(loss=True), TWICE),
        Key("turn", "loss", answer(loss=False), UNTRAINED),
        Key("turn", "loss", question(loss=True), ""),
        Key("turn", "loss_scale", answer(loss_scale=1.0), TWICE),
        Key("turn", "loss_scale", answer(loss_scale=2.0), ""),
        Key("turn", "tool_calls", answer(tool_calls=CALL), f"{TWICE} calls f"),
        Key("part", "text", parts(TEXT), SAID),
        Key("part", "image_url", image(image_url="a.png"), SEEN),
        Key("part", "source", image(source={"type": "base64", "data": "x"}), ""),
        Key("record", "positive_messages", swift(), "hi | + yes"),
        Key("record", "label", swift(label=0.8), "hi | + yes | scores 0.8"),
        Key("record", "label", swift(label=0), "hi | + yes | scores 0"),
        Key("record", "negative_messages", swift(negative_messages=[[ASKED]]), "hi | + yes | - hi"),
        Key(
            "record",
            "positive_images",
            swift(positive_images=[["a.png"]]),
            "hi | + <image>yes a.png",
        ),
        Key(
            "record",
            "negative_images",
            swift(negative_messages=[[ASKED]], negative_images=[["a.png"]]),
            "hi | + yes | - <image>hi a.png",
        ),
        *refused("record", swift, videos=["a.mp4"], positive_videos=[["a.mp4"]]),
        *refused("record", swift, negative_videos=[["a.mp4"]], audios=["a.wav"]),
        *refused("record", swift, positive_audios=[["a.wav"]], negative_audios=[["a.wav"]]),
    ],
)
LLAMA_FACTORY = Project(
    "LLaMA-Factory",
    "hiyouga/LLaMA-Factory at ff6d4d12eeb0, data/README.md and data/v1_sft_demo.jsonl, "
    "v1_dpo_demo.jsonl",
    [
        Key("record", "conversations", llava(), SAID),
        Key("record", "messages", chat(), SAID),
        Key("record", "images", llava(images=["a.png"]), SEEN),
        Key("record", "system", llava(system="be brief"), f"{BRIEF} | {SAID}"),
        Key("record", "tools", llava(tools='[{"name": "f"}]'), f"tools f | {SAID}"),
        *refused("record", llava, kto_tag=False),
        *refused("record", llava, chosen=FROM[1], rejected=FROM[1]),
        Key("record", "videos", llava(videos=["a.mp4"]), PLAYED),
        *refused("record", llava, audios=["a.wav"]),
        *every(
            instruct(input="a", history=[["a", "b"]]), f"{BEFORE} | user: hi\na | assistant: yes"
        ),
        *whole({"instruction": "hi", "chosen": "yes", "rejected": "no"}, {"text": "words"}),
        *whole({"chosen_messages": [ASKED, ANSWER], "rejected_messages": [ASKED, ANSWER]}),
        Key("turn", "from", llava(), SAID),
        Key("turn", "value", llava(), SAID),
        Key("turn", "loss_weight", answer(loss_weight=1.0), TWICE),
        Key("turn", "loss_weight", answer(loss_weight=0.0), UNTRAINED),
        Key("turn", "loss_weight", question(loss_weight=0.0), SAID),
        Key("turn", "loss_weight", answer(loss_weight=0.5), ""),
        Key("part", "value", parts({"type": "text", "value": "hi"}), ""),
    ],
)
AXOLOTL = Project(
    "axolotl",
    "axolotl-ai-cloud/axolotl at 067b021c8b87, docs/dataset-formats/*.qmd, docs/multimodal.qmd "
    "and docs/rlhf.qmd",
    [
        Key("record", "messages", chat(), SAID),
        Key("record", "conversations", llava(), SAID),
        Key("record", "images", chat(images=["a.png"]), SEEN),
        Key("record", "image", chat(image=["a.png"]), SEEN),
        Key("record", "system", chat(system="be brief"), f"{BRIEF} | {SAID}"),
        Key("record", "tools", chat(tools=CALL), f"tools f | {SAID}"),
        *refused("record", chat, chosen=ANSWER, rejected=ANSWER),
        *every(instruct(input="a"), "user: hi\na | assistant: yes"),
        *whole({"text": "words"}),
        *every(vqa(), SAID),
        *refused("record", vqa, choices=["a"], explanation="b", context="a"),
        *whole({"system_prompt": "a", "question": "hi", "response": "yes"}),
        *whole({"article": "a", "summary": "b"}),
        *whole({"instruction": "a", "revision": "b", "scores": "c", "critiques": "d"}),
        *whole({"prompt": "a", "generation": "b"}, {"message_1": "a", "message_2": "b"}),
        *whole({"INSTRUCTION": "a", "RESPONSE": "b"}, {"reflection": "a", "corrected": "b"}),
        *whole({"prompt": "a", "completions": ["b"], "labels": [True]}),
        *whole({"segments": [{"label": False, "text": "a"}]}),
        *whole({"input_ids": [1], "attention_mask": [1], "labels": [-100]}),
        *whole({"instruction": "a", "chosen_response": "b", "rejected_response": "c"}),
        *whole({"prompt": "a", "completion": "b", "label": False, "answers": [{"rank": 1}]}),
        Key("turn", "train", llava_answer(train=True), TWICE),
        Key("turn", "train", llava_answer(train=False), UNTRAINED),
        Key("turn", "train", question(train=False), SAID),
        Key("turn", "train", question(train=True), ""),
        *refused("turn", llava_answer, train_detail=[{"begin_offset": 0, "train": False}]),
        Key("turn", "tool_calls", answer(tool_calls=CALL), f"{TWICE} calls f"),
        *refused("turn", answer, reasoning_content="hm", name="f"),
        *refused("turn", answer, tool_call_id="c1"),
        Key("part", "text", parts(TEXT), SAID),
        Key("part", "train", answered(train=True), "user: hi | assistant: hi"),
        Key("part", "train", answered(train=False), ""),
        Key("part", "weight", answered(weight=1), "user: hi | assistant: hi"),
        Key("part", "weight", answered(weight=0), ""),
        Key("part", "content", parts({"type": "text", "content": "hi"}), ""),
        Key("part", "value", parts({"type": "text", "value": "hi"}), ""),
        Key("part", "path", image(path="a.png"), SEEN),
        Key("part", "url", image(url="a.png"), SEEN),
        Key("part", "image", image(image="a.png"), SEEN),
        *refused("part", image, base64="iVBORw0KGgo="),
    ],
)
TRL = Project(
    "TRL",
    "huggingface/trl at f2cd57710ae3, docs/source/dataset_formats.md and the columns of "
    "trl/trainer/sft_trainer.py",
    [
        Key("record", "messages", chat(), SAID),
        Key("record", "images", parts({"type": "image"}, TEXT, images=["a.png"]), SEEN),
        Key("record", "image", parts({"type": "image"}, TEXT, image="a.png"), SEEN),
        Key("record", "tools", chat(tools=CALL), f"tools f | {SAID}"),
        *refused("record", chat, chat_template_kwargs={"enable_thinking": False}),
        *refused("record", chat, assistant_masks=[0, 1], completion_mask=[0, 1], label=False),
        *whole({"text": "words"}, {"prompt": [ASKED], "completion": [ANSWER], "label": False}),
        *whole({"prompt": [ASKED], "chosen": [ANSWER], "rejected": [ANSWER]}),
        *whole({"prompt": "a", "completions": ["b"], "labels": [False]}),
        *whole({"input_ids": [1], "labels": [-100], "completion_mask": [0]}),
        Key("turn", "tool_calls", answer(tool_calls=CALL), f"{TWICE} calls f"),
        *refused("turn", answer, name="f", thinking="hm"),
        Key("part", "type", parts(TEXT), SAID),
        Key("part", "text", parts(TEXT), SAID),
    ],
)
QWEN = Project(
    "Qwen's scripts",
    "QwenLM/Qwen3-VL at 96588727e44c, qwen-vl-finetune/README.md, README.md and "
    "qwen-vl-utils/README.md",
    [
        Key("record", "conversations", llava(), SAID),
        Key("record", "image", llava(image="a.png"), SEEN),
        Key("record", "video", llava(video="a.mp4"), PLAYED),
        *refused("record", llava, data_path="data"),
        Key("turn", "from", llava(), SAID),
        Key("turn", "value", llava(), SAID),
        Key("part", "image", image(image="file://a.png"), SEEN),
        Key("part", "image_url", image(image_url={"url": "a.png"}), SEEN),
        *(
            Key("part", name, image(image="a.png", **{name: 280}), "")
            for name in ("min_pixels", "max_pixels", "resized_height", "resized_width")
        ),
        Key("part", "video", parts({"type": "video", "video": "a.mp4"}, TEXT), PLAYED),
        *(
            Key("part", name, image(image="a.png", **{name: 2}), "")
            for name in ("fps", "total_pixels")
        ),
    ],
)
OPENAI = Project(
    "OpenAI",
    "openai/openai-openapi at bf2a3402d170, openapi.yaml: FineTuneChatRequestInput, "
    "FineTunePreferenceRequestInput and the messages that they name",
    [
        Key("record", "messages", chat(), SAID),
        Key("record", "tools", chat(tools=CALL), f"tools f | {SAID}"),
        *refused("record", chat, functions=[{"name": "f"}], parallel_tool_calls=False),
        *whole({"input": chat(), "preferred_completion": [], "non_preferred_completion": [ANSWER]}),
        Key("turn", "role", chat(), SAID),
        Key("turn", "content", chat(), SAID),
        Key("turn", "weight", answer(weight=1), TWICE),
        Key("turn", "weight", answer(weight=0), UNTRAINED),
        *refused("turn", answer, name="Ann", refusal="I can't", audio={"id": "a"}),
        Key("turn", "tool_calls", answer(tool_calls=CALL), f"{TWICE} calls f"),
        *refused("turn", answer, function_call={"name": "f"}, tool_call_id="c"),
        Key("part", "text", parts(TEXT), SAID),
        Key(
            "part",
            "image_url",
            parts({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT),
            SEEN,
        ),
        Key("part", "detail", image(image_url={"url": "a.png", "detail": "low"}), ""),
        Key(
            "part", "input_audio", parts({"type": "input_audio", "input_audio": {"data": "x"}}), ""
        ),
        Key("part", "file", parts({"type": "file", "file": {"file_id": "x"}}), ""),
        Key("part", "refusal", parts({"type": "refusal", "refusal": "no"}), ""),
    ],
)
FLAG_EMBEDDING = Project(
    "FlagEmbedding",
    "FlagOpen/FlagEmbedding at 7ed43d67ec03, examples/finetune/embedder/README.md and the columns "
    "of FlagEmbedding/abc/finetune/embedder/AbsDataset.py",
    [
        Key("record", "query", flag(), "hi | + yes | - no"),
        Key("record", "pos", flag(pos=["yes"]), "hi | + yes | - no"),
        Key("record", "neg", flag(neg=["no", "nay"]), "hi | + yes | - no | - nay"),
        Key(
            "record",
            "pos_scores",
            flag(pos_scores=[3], neg_scores=[-1.5]),
            "hi | + yes | - no | scores 3 -1.5",
        ),
        Key(
            "record",
            "neg_scores",
            flag(pos_scores=[3], neg_scores=[1]),
            "hi | + yes | - no | scores 3 1",
        ),
        Key("record", "neg_scores", flag(neg_scores=[1]), ""),
        Key("record", "prompt", flag(prompt="find: "), "[find: ] hi | + yes | - no"),
        Key("record", "type", flag(type="normal"), "hi | + yes | - no"),
        Key("record", "type", flag(type="symmetric_clustering"), ""),
        *refused("record", flag, batch_size=8, train_group_size=4),
    ],
)
SENTENCE_TRANSFORMERS = Project(
    "sentence-transformers",
    "UKPLab/sentence-transformers at 85ec64559f44, docs/sentence_transformer/dataset_overview.md, "
    "loss_overview.md and training_overview.md",
    [
        Key("record", "anchor", {"anchor": "hi", "positive": "yes"}, "hi | + yes"),
        Key("record", "positive", {"anchor": "hi", "positive": "yes"}, "hi | + yes"),
        Key("record", "negative", pair(negative="no"), "hi | + yes | - no"),
        Key(
            "record",
            "negative_1",
            pair(negative_2="nay", negative_1="no"),
            "hi | + yes | - no | - nay",
        ),
        Key("record", "query", pair(), "hi | + yes"),
        *(
            Key(
                "record",
                name,
                {"sentence1": "hi", "sentence2": "yes", "score": 0.5},
                f"{_PAIR} 0.5",
            )
            for name in ("sentence1", "sentence2", "score")
        ),
        Key("record", "label", {"sentence1": "hi", "sentence2": "yes", "label": 1}, f"{_PAIR} 1"),
        Key("record", "label", {"anchor": "hi", "positive": "yes", "label": 0}, f"{_PAIR} 0"),
        Key(
            "record",
            "label",
            {"anchor": "hi", "positive": "yes", "negative": "no", "label": [0.9, 0.2]},
            "hi | + yes | - no | scores 0.9 0.2",
        ),
        Key("record", "scores", pair(scores=[0.5]), f"{_PAIR} 0.5"),
        *refused("record", pair, labels=[1], answer="yes", type="a", question="hi"),
        *whole({"premise": "hi", "hypothesis": "yes"}, {"text1": "hi", "text2": "yes"}),
        *(
            Key("record", name, pair(**{name: "x"}), "hi | + yes")
            for name in ("sample_id", "metadata", "source")
        ),
    ],
)
PROJECTS = [
    MS_SWIFT,
    LLAMA_FACTORY,
    AXOLOTL,
    TRL,
    QWEN,
    OPENAI,
    FLAG_EMBEDDING,
    SENTENCE_TRANSFORMERS,
]


def table() -> str:
    """The table of docs/data.md, in Markdown."""
    lines = ["| project | read | refused by name |", "| --- | --- | --- |"]
    for project in PROJECTS:
        cells = []
        for is_read in (True, False):
            names = [
                (
                    level,
                    list(
                        dict.fromkeys(
                            k.name
                            for k in project.keys
                            if k.level == level and bool(k.read) == is_read
                        )
                    ),
                )
                for level in LEVELS
            ]
            cells.append("; ".join(f"{level}: {_code(n)}" for level, n in names if n))
        lines.append(f"| {project.name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def sources() -> str:
    """Where the keys were taken from, one project a line."""
    return "\n".join(f"- {project.name}: {project.source}." for project in PROJECTS)


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(table(), sources(), sep="\n\n")
