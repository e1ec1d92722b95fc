"""The one exception for mistakes that the user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's: one line that says what was given, what was expected, what to do.

    The command line prints it without a traceback and exits with status 2.
    """
