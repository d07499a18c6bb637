"""All rules on all models."""

from collections.abc import Iterator
from pathlib import Path

from ..targets import Target
from .finding import Finding, Level
from .model import Model, Repository, list_variants, open_repository
from .rules import RULES
from .words import find_nearest

# A suppression that no rule is called; not a rule itself, for none of them may switch it off.
UNKNOWN_SUPPRESSION = "unknown-suppression"


def lint(folder: Path, target: Target) -> list[Finding]:
    """Return what is wrong with a repository, by model and line; reads files only.

    Where models have configurations in `configs/NAME.pbtxt`, the repository is looked at under each name as well.

    Args:
        folder: What tritonserver gets as `--model-repository`.
        target: The release that is to load it.

    Raises:
        RepositoryError: There is no such folder.
        OSError: Something in it cannot be read.
    """
    repositories = (open_repository(folder, target, variant) for variant in ("", *list_variants(folder)))
    found = [
        finding
        for repository in repositories
        for model in repository.models.values()
        for finding in _lint_model(model, repository)
    ]
    return sorted(dict.fromkeys(found), key=lambda each: (each.model, str(each.path), each.line))


def _lint_model(model: Model, repository: Repository) -> Iterator[Finding]:
    ignored = {name for name, _ in model.ignored}
    for rule in RULES.values():
        for problem in rule.check(model, repository) if rule.name not in ignored else ():
            yield Finding(
                rule=rule.name,
                level=rule.level,
                model=model.name,
                path=problem.path,
                line=problem.line,
                what=problem.what,
                instead=problem.instead,
            )
    for name, line in model.ignored:
        if name not in RULES:
            near = find_nearest(name, RULES)
            yield Finding(
                rule=UNKNOWN_SUPPRESSION,
                level=Level.WARNING,
                model=model.name,
                path=model.config_path,
                line=line,
                what=f"there is no rule {name} to ignore",
                instead=f"write `# modelyard: ignore={near}`" if near else "remove the comment",
            )
