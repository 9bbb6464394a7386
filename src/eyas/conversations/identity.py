"""Who a conversation is, and on which side of the split it stands: both are functions of its text alone.

So adding data, or reading it in another order, moves no conversation.
"""

from __future__ import annotations

import hashlib
import re

from eyas.conversations.rules import Conversation
from eyas.files import value_hash

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text without case, punctuation and spacing: what exact comparison of prompts looks at."""
    return _WORD.findall(text.casefold())


def conversation_id(conversation: Conversation) -> str:
    """SHA-256 in hex of all roles and contents, given answers included."""
    return value_hash([[message.role, message.content] for message in conversation.messages])


def split_of(conversation: Conversation, validation_share: float) -> str:
    """``validation`` or ``train``, by the hash of the first user turn.

    Conversations that open with the same prompt (up to case and spacing) are on the same side, so no validation
    prefix is trained on.
    """
    opening = " ".join(conversation.user_turns[0].casefold().split())
    digest = hashlib.sha256(opening.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") / 2**64 < validation_share else "train"
