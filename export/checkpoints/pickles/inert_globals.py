"""Which names a pickle may mention, and what each becomes here. None is ever imported.

The policy, in this order:

1. The few that carry tensors and containers (`OrderedDict`, `torch._utils._rebuild_tensor_v2`, dtypes, ...) are built
   by functions of our own (`pickles/torch_zip.py`).
2. Names listed below only hold data in the files that trainers write; they become inert records.
3. Any other name of Python's standard library is refused wherever it stands: `os.system`, `builtins.eval`, ...
4. Elsewhere a class, recognised by its capital letter as PEP 8 has it, becomes an inert record: trainers store the
   settings of their users, whose classes nobody can list.
5. Any other name may be mentioned, but a pickle that calls it is refused.

Points 3 and 5 protect nobody here, since nothing is ever called. They protect those who open the same file with
`torch.load`, and they keep a file that was tampered with from being published.
"""

from __future__ import annotations

import sys

# Python's own tables, which its unpickler uses (Lib/pickle.py, find_class).
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

_DATA_HOLDERS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "_io": "BytesIO StringIO",
        "argparse": "Namespace",
        "builtins": "Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int list object range"
        " set slice str tuple type",
        "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque",
        "copyreg": "_reconstructor",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "deepspeed.utils.tensor_fragment": "fragment_address",
        "fractions": "Fraction",
        # What settings made from configuration files consist of; what it would call is looked at as any other name.
        "functools": "partial reduce",
        "numpy": "dtype ndarray",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy._core.numeric": "_frombuffer",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
        "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "random": "Random",
        # A regular expression is compiled again from its text.
        "re": "_compile",
        "torch": "device",
        "torch._utils": "_rebuild_device_tensor_from_numpy _rebuild_meta_tensor_no_storage _rebuild_nested_tensor"
        " _rebuild_qtensor _rebuild_sparse_tensor _rebuild_wrapper_subclass",
        "torch.serialization": "_get_layout",
        "types": "GenericAlias SimpleNamespace UnionType",
        # The annotations in OmegaConf's settings, which Hydra puts into `.ckpt` files.
        "operator": "getitem or_",
        "_operator": "getitem or_",
        "typing": "Any Dict List Optional Sequence Tuple Union",
        "uuid": "UUID",
        # The same class, as Python 3.10 and later name it in some pickles.
        "zoneinfo": "ZoneInfo",
    }.items()
    for name in names.split()
)


def normalise_global(module: str, name: str) -> str:
    """Return the full name of a global, as Python 3 knows it.

    Protocols below 3 are written with Python 2's names (pickle's `fix_imports`): `commands.Popen` is
    `subprocess.Popen`.
    """
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[(module, name)]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


def may_be_mentioned(full_name: str) -> bool:
    """Tell whether a pickle may name `full_name` at all (points 2 and 3)."""
    return full_name in _DATA_HOLDERS or full_name.split(".", 1)[0] not in sys.stdlib_module_names


def may_be_called(full_name: str) -> bool:
    """Tell whether a pickle may make a record by calling `full_name` (points 2, 4 and 5)."""
    if full_name in _DATA_HOLDERS:
        return True
    return may_be_mentioned(full_name) and full_name.rpartition(".")[2].lstrip("_")[:1].isupper()
