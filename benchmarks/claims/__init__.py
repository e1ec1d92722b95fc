"""Claims of the LT2 paper (arXiv 2605.20670), each checked on this code by a script of its own."""
