"""Dreamer (arXiv 2601.21582): one layer of depth, sequence and expert attention, applied D times.

A layered model is a Dreamer whose experts are its layers and whose routing is one-hot by depth.
Students start there, exactly, and training releases the routing.
"""
