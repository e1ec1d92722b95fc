"""The one exception for mistakes that the user can mend, and the one line of any other."""

from __future__ import annotations

from collections.abc import Sequence

# Of PyTorch on GPUs, on CPUs (two platforms), of cuBLAS and cuDNN.
_REFUSALS = (
    "out of memory",
    "allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


class UserError(ValueError):
    """A mistake of the user's: one line that says what was given, what was expected, what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class Mistakes(UserError):
    """Several of them, a line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, 200 characters at most; its type without one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it followed from, says that memory was refused.

    A refusal while a CUDA graph is captured comes out as the failure of the capture.
    """
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError) or any(words in text for words in _REFUSALS):
            return True
        error = error.__cause__ or error.__context__
    return False
