"""Eyas trains EAGLE-3 draft heads for large language models, reproducibly."""
