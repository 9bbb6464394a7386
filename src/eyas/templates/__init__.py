"""Chat templates: prompts as token ids, and loss masks from generation boundaries."""
