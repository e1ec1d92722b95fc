"""lm-eval tasks that need no download: YAML files and the code that makes their documents.

Found by lm-eval itself with ``--include_path <this folder>``; ``ltconvert_offline`` is the group.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
GROUP = "ltconvert_offline"
