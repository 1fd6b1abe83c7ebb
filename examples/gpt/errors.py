"""The one error that an example shows as a single line instead of a traceback."""


class ExampleError(Exception):
    """Something the user can put right: the message is one line that says what was got and what is allowed."""
