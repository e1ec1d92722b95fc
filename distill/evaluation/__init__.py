"""Measurements, one file each: held-out scores, recall, generation and speed, lm-eval's tasks."""
