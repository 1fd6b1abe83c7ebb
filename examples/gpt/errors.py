"""The error that examples print as a single line instead of a traceback."""


class ExampleError(Exception):
    """Something the user can fix: one line that says what was given and what is allowed."""
