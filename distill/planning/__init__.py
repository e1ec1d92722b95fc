"""What a run will need: memory, work, disk. Put together by ``ltconvert.distill.plan``."""
