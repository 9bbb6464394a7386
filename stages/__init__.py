"""One thin script per DVC stage."""
