"""Functions with a written-out backward that torch.compile takes as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """``function``, which applies an ``autograd.Function``, as one node of a compiled graph.

    Traced into, torch 2.11 gives gradients of 0, without a word, where an output is what ``.to`` or
    an operation in place gives back, and takes lists from starred targets for tuples.
    """
    kept: Function = torch.compiler.allow_in_graph(function)
    return kept
