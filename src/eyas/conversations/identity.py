"""Who a conversation is, and on which side of the split it stands: both are functions of its text alone.

So adding data, or reading it in another order, moves no conversation.
"""

from __future__ import annotations

import hashlib

from eyas.conversations.rules import Conversation
from eyas.files import value_hash


def conversation_id(conversation: Conversation) -> str:
    """SHA-256 in hex of all that the conversation holds, given answers included.

    Where there is nothing but roles and contents, of these alone: tools and reasoning came later, and ids decide who
    is sampled.
    """
    messages = [message.as_dict() for message in conversation.messages]
    if not conversation.tools and all(message.keys() == {"role", "content"} for message in messages):
        return value_hash([[message["role"], message["content"]] for message in messages])
    return value_hash({"messages": messages, "tools": list(conversation.tools)})


def split_of(conversation: Conversation, validation_share: float) -> str:
    """``validation`` or ``train``, by the hash of the first user turn.

    Conversations that open with the same prompt (up to case and spacing) are on the same side, so no validation
    prefix is trained on.
    """
    opening = " ".join(conversation.user_turns[0].casefold().split())
    digest = hashlib.sha256(opening.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") / 2**64 < validation_share else "train"
