"""What transformers records beside weights of how pictures and sounds are prepared, and how its errors are told."""

# What transformers calls the file that holds a recipe.
PROCESSOR_FILE = "preprocessor_config.json"

# How Python tells a value of a wrong type, which nobody reads who wrote a file of settings.
_INTERNALS = (
    "NoneType",
    "__",
    "object",
    "invalid literal",
    "could not convert",
    "argument",
    "'<",
    "codec",
    "class ",
    "sys.",
)


def tell_foreign(exc: Exception) -> str:
    """Return what another library says of settings: its sentence, where it has one that is not about its own code."""
    said = str(exc).splitlines()[0].rstrip(".") if str(exc) else ""
    is_sentence = isinstance(exc, (OSError, ValueError, ImportError)) and " " in said
    return said if is_sentence and not any(part in said for part in _INTERNALS) else "settings that it cannot use"
