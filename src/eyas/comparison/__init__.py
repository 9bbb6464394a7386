"""The comparison room: takes two runs (Git revisions, the workspace, metrics folders); gives what is better or worse, and what changed."""
