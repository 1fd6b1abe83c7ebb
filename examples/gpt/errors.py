"""The error that examples print as a single line instead of a traceback."""


class ExampleError(Exception):
    """An error that the user can fix: one line that says what was given and what is allowed."""
