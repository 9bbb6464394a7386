"""Prompts are the template's own, and later turns go on from the ids as they were generated."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eyas.errors import EyasError
from eyas.templates.chat import ChatTemplate, Message
from tests.templates.doubles import make_double
from tests.tiny import CHATML, END, PAD, START, VOCAB, make_tiny_target

TRIM = CHATML.replace("message['content']", "message['content'] | trim")
DROP_REASONING = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
# no end-of-turn token: a newline ends a turn, and a newline is also what an answer may be cut at
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> ChatTemplate:
    return ChatTemplate(tiny_target)


def with_template(folder: Path, template: str | None) -> ChatTemplate:
    return ChatTemplate(make_tiny_target(folder / "target", chat_template=template))


def said(*contents: str, system: str | None = None) -> list[Message]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def test_vocabulary_and_special_tokens(chat: ChatTemplate) -> None:
    assert chat.vocab_size == VOCAB
    assert chat.special_ids == [PAD, START, END]


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_prompt_ids_are_the_templates_own(chat: ChatTemplate, tiny_target: Path, system: str | None) -> None:
    messages = said("Hello! How are you today?", system=system)
    expected = AutoTokenizer.from_pretrained(tiny_target).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert chat.prompt_ids(messages) == expected
    assert expected.count(START) == (3 if system else 2)


def test_decode_drops_special_tokens(chat: ChatTemplate) -> None:
    assert chat.decode([*chat.encode(ANSWER), END]) == ANSWER


def test_later_prompts_are_the_templates_own_where_the_answer_tokenises_identically(chat: ChatTemplate) -> None:
    first = said("What is the capital of France?", system="Be brief.")
    prompt_ids = chat.prompt_ids(first)
    messages = [*first, *said("", ANSWER, "Thank you.")[1:]]
    second = chat.next_prompt_ids(messages, prompt_ids, [*chat.encode(ANSWER), END])
    assert second == chat.prompt_ids(messages)

    third = [*messages, *said("", "Yes, of course.", "Write a short poem.")[1:]]
    answer_ids = [*chat.encode("Yes, of course."), END]
    assert chat.next_prompt_ids(third, second, answer_ids) == chat.prompt_ids(third)


def test_generated_ids_stay_where_the_text_would_tokenise_otherwise(chat: ChatTemplate) -> None:
    answer_ids = [i for letter in ANSWER for i in chat.encode(letter)] + [END]
    assert chat.decode(answer_ids) == ANSWER
    assert answer_ids[:-1] != chat.encode(ANSWER)
    prompt_ids = chat.prompt_ids(said("What?"))
    messages = said("What?", ANSWER, "Thank you.")
    following = chat.next_prompt_ids(messages, prompt_ids, answer_ids)
    assert following[: len(prompt_ids) + len(answer_ids)] == prompt_ids + answer_ids
    assert following != chat.prompt_ids(messages)
    assert "".join(chat.pieces(following)) == chat.render(messages, generation_prompt=True)


def test_the_end_of_turn_is_not_doubled(chat: ChatTemplate) -> None:
    messages = said("What?", ANSWER, "Thank you.")
    following = chat.next_prompt_ids(messages, chat.prompt_ids(said("What?")), [*chat.encode(ANSWER), END])
    assert following.count(END) == 3
    assert (END, END) not in pairwise(following)


def test_an_answer_cut_by_length_gets_the_templates_end_of_turn(chat: ChatTemplate) -> None:
    messages = said("What?", ANSWER, "Thank you.")
    prompt_ids, answer_ids = chat.prompt_ids(said("What?")), chat.encode(ANSWER)
    following = chat.next_prompt_ids(messages, prompt_ids, answer_ids)
    assert following == chat.prompt_ids(messages)
    assert following[len(prompt_ids) + len(answer_ids)] == END  # beyond the answer, so the mask leaves it out


def test_an_empty_answer(chat: ChatTemplate) -> None:
    messages, prompt_ids = said("What?", "", "Thank you."), chat.prompt_ids(said("What?"))
    assert chat.next_prompt_ids(messages, prompt_ids, [END]) == chat.prompt_ids(messages)
    assert chat.next_prompt_ids(messages, prompt_ids, []) == chat.prompt_ids(messages)


def test_a_cut_answer_that_ends_as_the_template_goes_on_loses_nothing(tmp_path: Path) -> None:
    chat = with_template(tmp_path, PLAIN)
    (newline,) = chat.encode("\n")
    answer_ids = [*chat.encode("1"), newline]
    messages = said("What?", "1\n", "Go on.")
    following = chat.next_prompt_ids(messages, chat.prompt_ids(said("What?")), answer_ids)
    assert "".join(chat.pieces(following)) == chat.render(messages, generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "answer"), [(TRIM, " Yes. "), (DROP_REASONING, "<think>So it is</think>Yes."), (TRIM, "Yes. ")]
)
def test_a_template_that_rewrites_history_is_rendered_afresh(tmp_path: Path, template: str, answer: str) -> None:
    chat = with_template(tmp_path, template)
    prompt_ids, answer_ids = chat.prompt_ids(said("What?")), [*chat.encode(answer), END]
    messages = said("What?", answer, "Thank you.")
    following = chat.next_prompt_ids(messages, prompt_ids, answer_ids)
    assert following == chat.prompt_ids(messages)
    assert following[: len(prompt_ids) + len(answer_ids)] != prompt_ids + answer_ids
    steady = said("What?", "Yes.", "Thank you.")  # nothing to rewrite in this one
    kept = [*prompt_ids, *chat.encode("Yes."), END]
    assert chat.next_prompt_ids(steady, prompt_ids, kept[len(prompt_ids) :])[: len(kept)] == kept


def test_a_missing_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"no chat template; put one into chat_template\.jinja"):
        with_template(tmp_path, None)


def test_a_template_file_goes_before_the_tokenizers(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", chat_template="never this")
    (target / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate(target).render(said("Hi"), generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_broken_tokenizer_is_an_error(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target")
    (target / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(EyasError, match="the tokenizer cannot be loaded"):
        ChatTemplate(target)


def test_the_ids_that_end_a_turn(chat: ChatTemplate, tiny_target: Path, tmp_path: Path) -> None:
    assert chat.end_ids == [END]
    gemma = make_double(tmp_path / "gemma", "gemma", tiny_target)
    assert gemma.pieces(gemma.end_ids) == ["<eos>", "<end_of_turn>"]
    (tmp_path / "gemma" / "generation_config.json").unlink()  # what the template itself writes is found without it
    alone = ChatTemplate(tmp_path / "gemma")
    assert alone.pieces(alone.end_ids) == ["<eos>", "<end_of_turn>"]


def test_dates_do_not_change_with_the_day(tiny_target: Path, tmp_path: Path) -> None:
    llama = make_double(tmp_path / "llama3", "llama3", tiny_target)
    assert "Today Date: 01 Jan 2026\n" in llama.render(said("Hi"), generation_prompt=True)
    dated = ChatTemplate(tmp_path / "llama3", variables={"date_string": "14 Jul 1789"})
    assert "Today Date: 14 Jul 1789\n" in dated.render(said("Hi"), generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "text", "thought", "content"),
    [
        ("qwen3", "<think>\nSo it is.\n</think>\n\nYes.<|im_end|>", "So it is.", "Yes."),
        ("qwen3", "<think>\n\n</think>\n\nYes.<|im_end|>", "", "Yes."),
        ("qwen3", "Yes </think> no<|im_end|>", "", "Yes </think> no"),
        ("qwen3", "<think>\nSo it is, and", "So it is, and", ""),
        ("chatml", "<think>So it is.</think>Yes.<|im_end|>", "So it is.", "Yes."),
        ("chatml", "Yes <think>.<|im_end|>", "", "Yes <think>."),
        ("deepseek-r1", "So it is.\n</think>\n\nYes.<｜end▁of▁sentence｜>", "So it is.", "Yes."),
        ("deepseek-r1", "So it is, and", "So it is, and", ""),
        ("kimi-k2.5", "So it is.</think>Yes.<|im_end|>", "So it is.", "Yes."),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "So it is.",
            "Yes.",
        ),
        ("gpt-oss", "<|channel|>final<|message|>Yes.<|return|>", "", "Yes."),
        ("gpt-oss", "<|channel|>analysis<|message|>So it is, and", "So it is, and", ""),
    ],
)
def test_generated_answers_as_messages(
    tiny_target: Path, tmp_path: Path, name: str, text: str, thought: str, content: str
) -> None:
    chat = make_double(tmp_path / name, name, tiny_target)
    answer = chat.parse_answer(chat.encode(text))
    assert answer == {"role": "assistant", "content": content} | ({"reasoning_content": thought} if thought else {})


def test_a_thoughtful_answer_leaves_history_without_its_thoughts(tiny_target: Path, tmp_path: Path) -> None:
    chat = make_double(tmp_path / "qwen3", "qwen3", tiny_target)
    first = said("What?")
    prompt, answer_ids = chat.prompt_ids(first), chat.encode("<think>\nSo.\n</think>\n\nYes.<|im_end|>")
    messages = [*first, chat.parse_answer(answer_ids), {"role": "user", "content": "Why?"}]
    following = chat.next_prompt_ids(messages, prompt, answer_ids)
    assert following == chat.prompt_ids(said("What?", "Yes.", "Why?"))


def test_an_answer_that_history_does_not_hold_is_not_gone_on_from(chat: ChatTemplate) -> None:
    prompt, answer_ids = chat.prompt_ids(said("What?")), [*chat.encode("Yes"), END]
    messages = said("What?", "Yes, sir.", "Why?")  # the data's answer, which begins alike
    assert chat.next_prompt_ids(messages, prompt, answer_ids) == chat.prompt_ids(messages)


def test_results_of_tools_go_on_from_generated_ids(tiny_target: Path, tmp_path: Path) -> None:
    chat = make_double(tmp_path / "kimi-k2", "kimi-k2", tiny_target)
    call = {"id": "get:0", "type": "function", "function": {"name": "get", "arguments": {}}}
    messages = [
        *said("What?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "get:0", "content": "18"},
    ]
    text = "".join(chat.pieces(chat.prompt_ids(messages)))
    assert text.endswith(
        "<|im_system|>tool<|im_middle|>## Return of get:0\n18<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    following = chat.next_prompt_ids(messages, chat.prompt_ids(messages[:1]), [*chat.encode("Well"), chat.end_ids[0]])
    assert following == chat.prompt_ids(messages)
