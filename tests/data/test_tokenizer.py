"""Our tokenizers and templates against transformers', which is not asked at run time."""

import subprocess
import sys

import pytest
from tokenizers import AddedToken

from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.conversation_formats import Turn
from jaxvlm.data.tokenizer import chat_template, chat_tokenizer

TEXTS = ["What color is the shape?", "red, blue; don't know", "is it a circle", "Grüße, 世界"]
TURNS = [
    Turn("system", "be brief"),
    Turn("user", "<image>\nWhat color is the shape?"),
    Turn("assistant", "blue"),
    Turn("user", "is it a circle"),
    Turn("assistant", "don't know"),
]
# Like ChatML (Qwen), with the image wrapped the way Qwen-VL does.
CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{% for part in message['content'] %}
{% if part.type == 'image' %}<|vision|><|image_pad|><|/vision|>{% else %}{{ part.text }}{% endif %}
{% endfor %}
{% endif %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def messages(turns):
    return [{"role": t.role, "content": t.content} for t in turns]


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_transformers_gives_the_same_ids(kind, tmp_path):
    from transformers import AutoTokenizer

    ours = chat_tokenizer.build(TEXTS, kind, 400)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    loaded = chat_tokenizer.load(tmp_path)
    for count in range(1, len(TURNS) + 1):
        prompt = TURNS[count - 1].role == "user"
        want = theirs.apply_chat_template(
            messages(TURNS[:count]), tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
        for mine in (ours, loaded):
            assert mine.encode(mine.render(TURNS[:count], prompt)) == want
    assert loaded.decode(want) == theirs.decode(want, skip_special_tokens=True)
    for mine in (ours, loaded):
        assert mine.pad_id == theirs.pad_token_id
        assert mine.eos_id == theirs.eos_token_id
        assert mine.image_id == theirs.convert_tokens_to_ids("<image>")
        assert mine.vocab_size == len(theirs)
        assert mine.stop_ids == (theirs.eos_token_id,)


def test_word_kind_knows_its_words_only():
    ours = chat_tokenizer.build(TEXTS, "word")
    ids = ours.encode("Red BLUE elephant")
    assert ours.decode(ids, skip_special=False) == "red blue <unk>"
    assert ours.decode([*ids, ours.eos_id, ours.pad_id]) == "red blue"


def test_bpe_gives_every_text_back():
    ours = chat_tokenizer.build(TEXTS, "bpe", 300)
    for text in ["Zebra  \n\t x", "日本語 🙂", "a\x00b"]:
        assert ours.decode(ours.encode(text)) == text


def test_build_is_deterministic():
    for kind in ("word", "bpe"):
        built = [chat_tokenizer.build(TEXTS, kind, 300).backend.to_str() for _ in range(2)]
        assert built[0] == built[1]


def test_build_refuses():
    with pytest.raises(DataError, match="use word or bpe"):
        chat_tokenizer.build(TEXTS, "char")
    with pytest.raises(DataError, match="bpe needs at least 263"):
        chat_tokenizer.build(TEXTS, "bpe", 100)


def chatml_folder(folder, template=CHATML):
    """A folder as Qwen-VL's: other special tokens, template in a file of its own."""
    base = chat_tokenizer.build(TEXTS, "bpe", 300)
    names = ["<|im_start|>", "<|im_end|>", "<|vision|>", "<|/vision|>", "<|image_pad|>", "<|end|>"]
    base.backend.add_special_tokens([AddedToken(n, normalized=False) for n in names])
    special = {"eos_token": "<|end|>", "pad_token": "<|end|>", "image_token": "<|image_pad|>"}
    chat_tokenizer.ChatTokenizer(base.backend, template, special).save(folder)
    return folder


def test_template_that_takes_images(tmp_path):
    from transformers import AutoTokenizer

    ours = chat_tokenizer.load(chatml_folder(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    parts = [{"type": "image"}, {"type": "text", "text": "\nWhat color is the shape?"}]
    listed = messages(TURNS)
    listed[1]["content"] = parts
    text = theirs.apply_chat_template(listed, tokenize=False)
    assert "<|vision|><|image_pad|><|/vision|>" in text
    assert ours.render(TURNS) == text
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert ours.stop_ids == (theirs.eos_token_id, end)


def test_template_of_text_gets_the_image_token_inside_it(tmp_path):
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    ours = chat_tokenizer.load(chatml_folder(tmp_path, plain))
    assert ours.render(TURNS[1:2]) == "[user] <|image_pad|>\nWhat color is the shape?<|im_end|>"


def test_folder_without_an_image_token_gets_one(tmp_path):
    chatml_folder(tmp_path)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        text = (tmp_path / name).read_text()
        text = text.replace("<|image_pad|>", "<|other|>").replace("<image>", "<|old|>")
        (tmp_path / name).write_text(text)
    before = chat_tokenizer.tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = chat_tokenizer.load(tmp_path)
    assert ours.special["image_token"] == "<|other|>"  # still the one that the config names
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"image_token"', '"unused_token"'))
    ours = chat_tokenizer.load(tmp_path)
    assert ours.image_id == before.get_vocab_size()
    assert ours.vocab_size == ours.image_id + 1


def test_load_refuses(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        chat_tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="can't be read"):
        chat_tokenizer.load(tmp_path)
    chat_tokenizer.build(TEXTS).save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("chat_template", "gone"))
    with pytest.raises(DataError, match="no chat template"):
        chat_tokenizer.load(tmp_path)


def test_data_needs_neither_torch_nor_transformers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from jaxvlm.data import Dataset\n"
        "from jaxvlm.data.tokenizer import chat_tokenizer\n"
        "t = chat_tokenizer.build(['a b'])\n"
        "assert t.encode('b a')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1 / 0 }}",
        "{{ {}['a'].b }}",
        "{{ [][3] + 1 }}",
        "{{ '%d' | format('a') }}",
        "{{ messages[0].content.encode('ascii', 'no such handler') and cycler() }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{% set n=namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    ],
)
def test_a_template_that_raises_loops_or_fills_the_memory_is_an_error(text):
    with pytest.raises(chat_template.TemplateError):
        chat_template.render(text, [{"role": "user", "content": "a"}])
    rest = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content + '!' * 2 }}{% endfor %}"
    assert chat_template.render(rest, [{"role": "user", "content": "a"}]) == "user: a!!"


def test_an_error_that_no_template_raises_passes_through():
    class Broken:
        def __str__(self):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        chat_template.render("{{ messages[0].content }}", [{"role": "user", "content": Broken()}])
