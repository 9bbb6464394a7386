"""The one exception for a fault that the user can mend: its text says what, where and what to do."""


class EyasError(Exception):
    """A clear, final message for the user; the command line prints it without a traceback and exits with 1."""
