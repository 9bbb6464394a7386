"""Artefacts between machines: the DVC remote, one profile's objects to and from it, and a repro that uses them."""
