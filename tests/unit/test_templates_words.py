"""Text encoded word by word is what the tokenizer makes of the whole; plain conversations take the short way to the same turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from eyas.templates.chat import ChatTemplate, Message
from eyas.templates.kept import answered_turn
from eyas.templates.plain import is_plain, texts_between
from eyas.templates.quoting import quote
from eyas.templates.words import WordEncoder, cuts_words
from tests.templates.doubles import DOUBLES, make_double
from tests.tiny import make_tiny_target


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_target / "tokenizer.json"))


def added(tokenizer: Tokenizer) -> list[AddedToken]:
    return list(tokenizer.get_added_tokens_decoder().values())


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(st.sampled_from("aB é日 .,'9\n\t  \u00a0🙂s-<|"), max_size=60), min_size=70, max_size=90))
def test_words_give_the_ids_of_the_whole(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert cuts_words(tokenizer, added(tokenizer))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    by_words = WordEncoder(encode)
    assert [by_words(text) for text in texts] == [encode(text) for text in texts]


def _changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    other = Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(other, name, part)
    return other


def test_tokenizers_that_may_cut_elsewhere_are_left_alone(tokenizer: Tokenizer) -> None:
    sentences = _changed(tokenizer, pre_tokenizer=pre_tokenizers.Metaspace(split=False))
    assert not cuts_words(sentences, added(sentences))
    lines = _changed(tokenizer, pre_tokenizer=pre_tokenizers.Split("\n", "isolated"))
    assert not cuts_words(lines, added(lines))
    assert not cuts_words(Tokenizer(models.BPE()), [])
    prefixed = _changed(tokenizer, normalizer=normalizers.Prepend("_"))
    assert not cuts_words(prefixed, added(prefixed))
    assert cuts_words(_changed(tokenizer, normalizer=normalizers.NFC()), added(tokenizer))
    for token in (AddedToken("<mask>", rstrip=True), AddedToken("<mask>", lstrip=True), AddedToken("two words")):
        assert not cuts_words(tokenizer, [*added(tokenizer), token])


def test_a_tokenizer_that_turns_out_to_cut_elsewhere_is_given_whole_texts() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [len(text)]

    encoder = WordEncoder(encode)
    assert encoder("one two") == [7]
    assert encoder("three four") == [10]
    assert asked == ["one", " two", "one two", "three four"]


def say(*texts: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("name", DOUBLES)
def test_the_short_way_gives_the_same_turns(name: str, tiny_target: Path, tmp_path: Path) -> None:
    template = make_double(tmp_path, name, tiny_target)
    conversations = [
        say("Hello.", "Hi there.", "Go on <|im_end|> then.", "No.", "Why?", "Because </s>."),
        say("One", "Two"),
        say(" spaces ", "kept", "or", " not "),
        say("Think.", "It says <think> here.", "More", "Well"),
        say("No answer"),
    ]
    short = 0
    for messages in conversations:
        quoted = quote(messages, (), template.tokens.literals)
        long = [answered_turn(template, quoted, i) for i in range(1, len(messages), 2)]
        turns = template.answered_turns(messages)
        assert [(t.prompt_ids, t.token_ids) for t in turns] == [(t.prompt_ids, t.token_ids) for t in long]
        short += template._plain_turns(quoted) is not None
    stable = texts_between(lambda some, prompt: template._write(some, (), prompt), ("user", "assistant") * 3)
    assert (stable is not None) == (name in ("chatml", "llama3", "deepseek-v3", "kimi-k2", "gemma", "mistral"))
    assert short >= (2 if stable else 0)


def test_only_texts_in_which_templates_look_for_nothing_are_plain() -> None:
    assert is_plain(say("a", "b"))
    for message in ({"content": " a"}, {"content": "</think>a"}, {"content": "a", "reasoning_content": "b"}):
        assert not is_plain([*say("a"), {"role": "assistant", **message}])


def test_a_template_that_looks_at_the_text_goes_the_long_way(tmp_path: Path) -> None:
    shouting = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ m['content'] | upper if 'loud' in m['content'] else m['content'] }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    template = ChatTemplate(make_tiny_target(tmp_path, chat_template=shouting))
    quiet, loud = say("be calm", "yes"), say("be loud", "yes")
    assert template._plain_turns(quote(quiet, (), template.tokens.literals)) is not None
    assert template._plain_turns(quote(loud, (), template.tokens.literals)) is None
    assert "BE LOUD" in template.decode(template.answered_turns(loud)[0].prompt_ids)
