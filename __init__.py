"""ltconvert: turn a pretrained language model into a cheaper student that behaves the same."""

__version__ = "0.1.0"
