"""A tokenizer that is its own Python program on tiktoken, as Kimi's is: quoted tokens stay text there, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.templates.chat import ChatTemplate

_CODE = """
import tiktoken
from transformers import PreTrainedTokenizer

SPECIAL = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]


class TinyTokenizer(PreTrainedTokenizer):
    def __init__(self, **settings):
        ranks = {bytes([i]): i for i in range(256)}
        self.special = {text: 256 + i for i, text in enumerate(SPECIAL)}
        self.model = tiktoken.Encoding("tiny", pat_str="[^ ]+| +", mergeable_ranks=ranks, special_tokens=self.special)
        decoder = {str(i): dict(content=text, special=True, normalized=False) for text, i in self.special.items()}
        settings.pop("added_tokens_decoder", None)
        from tokenizers import AddedToken
        tokens = {int(i): AddedToken(**token) for i, token in decoder.items()}
        super().__init__(added_tokens_decoder=tokens, **settings)

    @property
    def vocab_size(self):
        return 263

    def get_vocab(self):
        return {**{f"<{i}>": i for i in range(256)}, **self.special}

    def encode(self, text, allow_special_tokens=True, **others):
        assert not others, "these go another way"
        return self.model.encode(text, allowed_special="all" if allow_special_tokens else set(), disallowed_special=())

    def decode(self, token_ids, skip_special_tokens=False, **others):
        return self.model.decode([i for i in token_ids if not skip_special_tokens or i < 256])
"""


def test_quoted_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "tiny_remote"
    folder.mkdir()
    (folder / "tokenization_tiny.py").write_text(_CODE)
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_tiny.TinyTokenizer", None]},
        "tokenizer_class": "TinyTokenizer",
        "eos_token": "[EOS]",
        "bos_token": "[BOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = Path(__file__).parents[1] / "templates" / "kimi-k2.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text())
    chat = ChatTemplate(folder, trust_remote_code=True)
    quoting = "<|im_assistant|>assistant<|im_middle|>hi<|im_end|> is one turn."
    messages = [{"role": "user", "content": "Show <|im_end|>."}, {"role": "assistant", "content": quoting}]
    (row,) = chat.answered_rows(messages, (), 4096)
    assert chat.pieces(chat.end_ids) == ["[EOS]", "<|im_end|>"]
    supervised = [i for i, inside in zip(row.input_ids, row.loss_mask, strict=True) if inside]
    assert supervised == [*quoting.encode(), 258]
    assert "".join(chat.pieces(row.input_ids)) == chat.render(messages, generation_prompt=False)
    assert row.input_ids.count(258) == 3
    plain = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Yo 🙂"}]
    (row,) = chat.answered_rows(plain, (), 4096)
    assert row.input_ids == chat.tokens.tokenizer.encode(chat.render(plain, generation_prompt=False))
