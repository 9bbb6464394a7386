"""Looking after DVC's cache and lock: integrity, space, adoption after a crash, merges, commits."""
