"""The report room: takes metrics and provenance of one profile; gives one HTML page, its plots as PNG, and a verdict in words."""
