"""Judging a draft head by serving: acceptance, speed and sameness of plain, n-gram and eagle3 decoding."""
