"""Chat templates of tokenizers: tokens, and which of them are scored."""

import json
from pathlib import Path
from typing import Any

import pytest
from corpora import BYTES, prepared, save_tokenizer
from records import expected, learned, recipe_of, write

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.records import Raw, spans_of
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (  # as Llama 2 and Mistral have it: the begin token first, the end token behind every answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('Only user and assistant') }}"
    "{% endif %}{% endfor %}"
)
FORGETFUL = (  # drops earlier answers, as templates of models that reason do with their reasoning
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = "{{ strftime_now('%Y') }}{% for m in messages %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}"
CHAT = [("user", " 1+1? "), ("assistant", "the <|im_end|> cat"), ("user", "Sure?"), ("assistant", "Yes.")]


def messages(chat: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in chat]}


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with such a chat template, whose end token is named."""

    def made(template: str | None, end: str = "<eos>") -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        save_tokenizer(folder)
        values = json.loads((folder / "tokenizer.json").read_text())
        for text in ("<bos>", "<|im_start|>", "<|im_end|>"):
            number = len(values["model"]["vocab"]) + len(values["added_tokens"]) - 1
            values["added_tokens"].append({**values["added_tokens"][0], "id": number, "content": text})
        if template == INST:
            begin = next(token["id"] for token in values["added_tokens"] if token["content"] == "<bos>")
            values["post_processor"] |= {
                "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<bos>": {"id": "<bos>", "ids": [begin], "tokens": ["<bos>"]}},
            }
        (folder / "tokenizer.json").write_text(json.dumps(values))
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": end, "bos_token": "<bos>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"chat_template": template} if template else {})))
        return load_tokenizer(str(folder))

    return made


def number_of(tokenizer: Tokenizer, text: str) -> int:
    (number,) = tokenizer.split_special(text)
    assert isinstance(number, int)
    return number


@pytest.mark.parametrize("end", ["<eos>", "<|im_end|>"])
def test_chat_template_gives_the_expected_tokens(with_template: Any, end: str) -> None:
    tokenizer = with_template(CHATML, end)
    starts, ends = number_of(tokenizer, "<|im_start|>"), number_of(tokenizer, "<|im_end|>")
    found = learned(messages(CHAT), tokenizer, form="chat", template="tokenizer")
    wanted = [
        (starts, False), ("user\n1+1?", False), (ends, False), ("\n", False), (starts, False), ("assistant\n", False),
        ("the <|im_end|> cat", True), (ends, True), ("\n", True),  # what the record spells is text
        (starts, False), ("user\nSure?", False), (ends, False), ("\n", False), (starts, False), ("assistant\n", False),
        ("Yes.", True),
    ]  # fmt: skip
    # The terminator of the last answer; where it is not the one that ends a document, that one as well.
    wanted += [(ends, True)] if end == "<|im_end|>" else [(ends, True), ("\n", True), (tokenizer.end, True)]
    assert found == expected(*wanted, tokenizer=tokenizer)
    # A final user message and its end token are not scored.
    found = learned(messages(CHAT[:3]), tokenizer, form="chat", template="tokenizer")
    assert [token for token, counts in found if counts] == [
        *tokenizer.encode("the <|im_end|> cat"),
        ends,
        *tokenizer.encode("\n"),
    ]
    assert found[-1] == (tokenizer.end, False)
    # And what comes before an answer is what generating from the same messages begins with.
    recipe = recipe_of(tokenizer, "chat", template="tokenizer")
    question = messages([("user", "the cat"), ("gpt", "sat")])
    asked, answer = spans_of(Raw(0, 1, question, 1, "table"), "a", recipe)
    assert asked.text == tokenizer.render_chat(question["messages"][:1])
    assert answer.text == ("sat" if end == "<|im_end|>" else "sat<|im_end|>\n")
    assert all(counts for _, counts in learned(question, tokenizer, form="chat", template="tokenizer", loss_on="all"))


def test_prompts_and_fields_use_the_chat_template(with_template: Any) -> None:
    tokenizer = with_template(INST)
    assert tokenizer.begin == number_of(tokenizer, "<bos>")  # which stands before every document, and not twice
    wanted = expected(("[INST] the cat [/INST]", False), (" sat on", True), (tokenizer.end, True), tokenizer=tokenizer)
    assert learned({"prompt": "the cat", "response": "sat on"}, tokenizer, form="prompt", template="tokenizer") == wanted
    settings = {"prompt_template": "the {q}", "response_template": "sat[ {a}]<|im_end|>", "template": "tokenizer"}
    ends = number_of(tokenizer, "<|im_end|>")
    wanted = expected(
        ("[INST] the <eos> [/INST]", False), (" sat on", True), (ends, True), (tokenizer.end, True), tokenizer=tokenizer
    )
    assert learned({"q": "<eos>", "a": "on"}, tokenizer, **settings) == wanted
    # Without that template, what a template spells is a token and what a record spells is text all the same.
    plain = settings | {"template": None}
    wanted = expected(("the <eos>", False), ("sat on", True), (ends, True), (tokenizer.end, True), tokenizer=tokenizer)
    assert learned({"q": "<eos>", "a": "on"}, tokenizer, **plain) == wanted


def test_messages_that_a_chat_template_rejects_are_reported(tmp_path: Path, with_template: Any) -> None:
    told = {"form": "chat", "template": "tokenizer"}
    with pytest.raises(ConfigError, match=r"^--template tokenizer: the byte tokenizer has no chat template; .*--template"):
        learned(messages(CHAT), BYTES, **told)
    with pytest.raises(ConfigError, match=r"^--template tokenizer: .*tokenizer\d+ has no chat template; .*--template"):
        learned(messages(CHAT), with_template(None), **told)
    with pytest.raises(ConfigError, match=r"^qa:7: .* rejects these messages \(Only user and assistant\)"):
        learned(messages([("system", "x"), *CHAT]), with_template(INST), **told)
    forgetful = with_template(FORGETFUL)
    message = r":2: .*message 4.* chat template .*; use one answer per record"
    file = write(tmp_path / "chat.jsonl", [messages(CHAT[:2]), messages(CHAT)])
    with pytest.raises(ConfigError, match=rf"chat\.jsonl{message}"):
        prepared(tmp_path / "out", file, forgetful, template="tokenizer")
    assert [p.name for p in tmp_path.iterdir()] == ["chat.jsonl"]
    with pytest.raises(ConfigError, match=r"rewrites the last answer"):
        learned(messages(CHAT[:3]), forgetful, **told)
    with pytest.raises(ConfigError, match="no message of role assistant"):
        learned(messages(CHAT[:1]), forgetful, **told)
    # Days and marks of what the model writes do not matter.
    marked = with_template(MARKED)
    assert "".join(
        span.text for span in spans_of(Raw(0, 1, messages(CHAT[2:]), 1, "table"), "a", recipe_of(marked, **told))
    ) == ("2024Sure?;Yes.;")


def test_another_chat_template_changes_the_recipe(tmp_path: Path, with_template: Any) -> None:
    file = write(tmp_path / "chat.jsonl", [messages(CHAT[2:])] * 3)
    one, other = (with_template(template) for template in (CHATML, CHATML.replace("trim", "upper")))
    assert one.fingerprint == other.fingerprint
    manifests = [
        prepared(tmp_path / name, file, tokenizer, template="tokenizer", validation_fraction=0.0)
        for name, tokenizer in (("one", one), ("other", other))
    ]
    assert manifests[0].identity != manifests[1].identity
    # The copy that lies beside the rows still knows how to hold such a conversation.
    copy = load_tokenizer(str(tmp_path / "one" / "tokenizer"))
    assert copy.chat_form() == one.chat_form()
    assert copy.fingerprint == one.fingerprint
