"""Conversations: reading, validating, identity and split, decontamination, and the bundled catalogue."""
