"""The names under which one published model appears in a repository. Needs no torch."""

import re
from dataclasses import dataclass

from ..artefacts import MODEL, POSTPROCESS, PREPROCESS
from ..errors import RepositoryError

# What a path component, a metrics label and a URL can all hold.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")

# A parameter of every configuration, which no backend reads: the public model that the folder belongs to.
OWNER_PARAMETER = "modelyard_owner"

# What the names of an ensemble's steps end in.
STEP_SUFFIXES = tuple(f"_{step}" for step in (PREPROCESS, MODEL, POSTPROCESS))


@dataclass(frozen=True, kw_only=True)
class ModelNames:
    """The names under which one published model appears in the repository.

    Attributes:
        name: What clients ask for: the ensemble, or the graph itself where nothing stands around it.
        is_ensemble: Whether there are steps of an ensemble.
        has_postprocess: Whether one of them makes the answers.
    """

    name: str
    is_ensemble: bool = True
    has_postprocess: bool = False

    def step(self, step: str) -> str:
        """Return the name of a step around the graph; that of the model itself where there are none of their own."""
        return f"{self.name}_{step}" if self.is_ensemble else self.name

    @property
    def preprocess(self) -> str:
        """The step that makes the graph's inputs of what clients send."""
        return self.step(PREPROCESS)

    @property
    def model(self) -> str:
        """What runs the ONNX file."""
        return self.step(MODEL) if self.is_ensemble else self.name

    @property
    def postprocess(self) -> str:
        """The step that makes answers of the graph's outputs, where the task has one."""
        return self.step(POSTPROCESS)

    @property
    def all(self) -> tuple[str, ...]:
        """Every name, steps first, the ensemble last."""
        if not self.is_ensemble:
            return (self.name,)
        postprocess = (self.postprocess,) if self.has_postprocess else ()
        return (self.preprocess, self.model, *postprocess, self.name)


def check_name(name: str) -> None:
    """Refuse a name that cannot be a model's.

    Raises:
        RepositoryError: It is empty, has a slash, begins with a dot, or holds another unsafe character.
    """
    if not _NAME.fullmatch(name):
        raise RepositoryError(
            "the model's name cannot be used",
            expected="letters, digits, '_', '-' and '.', a letter or digit first, at most 200",
            got=repr(name),
            remedy="pass another --name",
        )
