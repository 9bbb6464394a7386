"""Targets: resolving them, converting the bundled one, saying what they are."""
