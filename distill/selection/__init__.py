"""How layers are ranked: one file a method, all called by ``ltconvert.distill.select``."""
