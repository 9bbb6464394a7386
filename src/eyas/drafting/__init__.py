"""The draft head: its making, its data, its training, its held-out acceptance; the one room that imports speculators."""
