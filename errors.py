"""The one exception for mistakes that the user can mend, and the one line of any other."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's: one line that says what was given, what was expected, what to do.

    The command line prints it without a traceback and exits with status 2.
    """


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, 200 characters at most; its type without one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
