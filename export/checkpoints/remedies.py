"""What to do about a checkpoint that is not whole: the ends of the sentences in which many checks refuse one."""

import errno

GATHER_PIPELINE = "gather the whole model in the trainer and save its state dict as one .pt file"
RECOPY = "copy the checkpoint again"
RECOPY_OR_USE_OLDER = f"{RECOPY}, or use the one before it"
RECOPY_WHOLE = "copy the whole checkpoint again, from every node"
# Trainers that save to each node's own disk (DeepSpeed's use_node_local_storage) leave as many folders.
ALL_NODES = f"pass every node's folder as an argument of its own, or {RECOPY_WHOLE}"
LOST_RANKS = f"each node may have kept only its own ranks: {ALL_NODES}"
OTHER_RANKS = f"files are missing or of another run; {RECOPY_WHOLE}"
MIXED_RUNS = f"files of two runs are mixed; {RECOPY_WHOLE}"
REMOVE_OLDER = "files of two runs are mixed; remove those of the older one"
MIXED_SAVES = f"files of two saves are mixed, or swapped; {RECOPY_WHOLE}"
SWAPPED = f"rank files were swapped; {RECOPY_WHOLE}"
DOUBLED = f"one is a copy under the other's name; {RECOPY_WHOLE}"


def find_remedy(error: Exception) -> str:
    """Return what can be done about a file that the operating system does not let be read; nothing where none is."""
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return "let this user read it, and enter the folders that it is in"
    return RECOPY if isinstance(error, OSError) and error.errno == errno.EIO else ""
