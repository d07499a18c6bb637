"""The options of `run`: one table, from which the command line, the file of options and their conflicts are derived.

An option is declared once, at the field that it fills: of `ExportRequest`, of `VocabularyOptions`, or of a task in the
table of tasks. Imports nothing heavy, so that `--help` answers at once.
"""

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from .engines.engine import Form
from .engines.table import AUTO, ENGINES
from .errors import SettingsError
from .graph.batchings import BATCHINGS, EQUAL
from .graph.precisions import FP32, PRECISIONS
from .locations import REPOSITORY
from .option_kinds import BOUNDS, COUNTS, FLAG, NUMBER, PATH, PATHS, TEXT, Needs, Option, declare
from .options_file import OPTIONS_FILE, VARIANTS, read_file
from .serving_options import ServingOptions
from .targets import DEFAULT_TARGET
from .tasks.table import TASKS, list_task_options
from .weights.vocabulary_options import VOCABULARY_GROUP, AddedToken, VocabularyOptions

_PROOF = "graph and proof options"


# How the work around the graph is divided: name → what it is good for.
ENSEMBLE, LEAN = "ensemble", "lean"
LAYOUTS = {
    ENSEMBLE: "each step is a model of its own, and requests of one length are joined",
    LEAN: "one process does all of it; for texts, pictures and sounds on CPUs",
}


def _list_helps(choices: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {choice.help}" for name, choice in choices.items())


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What is exported, as what, and how it is proven.

    Attributes:
        checkpoint: Folder that a trainer or `save_pretrained` left; None where a factory builds the module.
        name: Name that clients will use.
        address: Where the checkpoint was fetched from, with its commit; empty for a folder that was here.
        repository: The Triton model repository.
        no_activate: Whether the version that is active stays so.
        task: What the checkpoint is served as; None finds it out.
        adapters: Folders of adapters, merged in this order.
        tag: Name of the checkpoint, where the folder holds several; the trainer's own choice where None.
        base: Folder with configuration and tokenizer; the checkpoint's own where None.
        allow_non_finite: Whether NaN and infinite weights are accepted.
        lora_scaling: DeepSpeed-Chat's scaling of the low-rank updates inside a checkpoint that it left.
        target: The Triton release that is to serve it.
        precision: Name of the precision of the published file.
        engine: Name of what runs it, or `auto`; None is the usual one of the task.
        steps: How the work around the graph is divided, one of `LAYOUTS`.
        lengths: What the tokens of a request are padded to, the smallest first; nothing for other requests where empty.
        batching: Name of what is run together, one of `BATCHINGS`.
        tolerances: Error → another bound for the verification than the usual one.
        accept_worse: Why a wider bound is accepted.
        factory: Function that builds the module, where transformers does not.
        inputs: File that describes that module's inputs and outputs.
        vocabulary: What becomes of the tokenizer and its rows.
        serving: How the server is to serve it.
        variants: Name → how a server is to serve it that is told that name.
        task_options: Option of a task → what was asked for, or None.
    """

    checkpoint: Path | None
    name: str
    address: str = ""
    repository: Path = declare(
        Option(name="repository", kind=PATH, help=f"Triton model repository (default: {REPOSITORY})"),
        default=REPOSITORY,
    )
    no_activate: bool = declare(
        Option(
            name="no_activate",
            kind=FLAG,
            help="only publish: servers go on serving the version that is active; `activate` makes this one active",
        ),
        default=False,
    )
    task: str | None = declare(
        Option(
            name="task",
            kind=TEXT,
            choices=tuple(TASKS),
            metavar="TASK",
            help="what it is served as; listed below (default: what it was trained for)",
            needs=Needs.ARCHITECTURE,
        ),
        default=None,
    )
    adapters: tuple[Path, ...] = declare(
        Option(
            name="adapter",
            kind=PATHS,
            help="LoRA adapters to merge, each the folder that peft saved, one after another",
            needs=Needs.ARCHITECTURE,
        ),
        default=(),
    )
    tag: str | None = declare(
        Option(
            name="tag",
            kind=TEXT,
            help="checkpoint to read, where the folder holds several (default: the trainer's own latest)",
            needs=Needs.CHECKPOINT,
        ),
        default=None,
    )
    base: Path | None = declare(
        Option(
            name="base",
            kind=PATH,
            help="folder with config.json and tokenizer, where the checkpoint's own has none",
            needs=Needs.ARCHITECTURE,
        ),
        default=None,
    )
    allow_non_finite: bool = declare(
        Option(
            name="allow_non_finite",
            kind=FLAG,
            help="accept NaN and infinite weights",
            needs=Needs.CHECKPOINT,
        ),
        default=False,
    )
    lora_scaling: float | None = declare(
        Option(
            name="lora_scaling",
            kind=NUMBER,
            metavar="S",
            help="lora_scaling of DeepSpeed-Chat, to merge its LoRA",
            needs=Needs.ARCHITECTURE,
        ),
        default=None,
    )
    target: str = declare(
        Option(
            name="target",
            kind=TEXT,
            metavar="RELEASE",
            help=f"Triton release that is to serve it (default: {DEFAULT_TARGET.release})",
        ),
        default=DEFAULT_TARGET.release,
        group=_PROOF,
    )
    precision: str = declare(
        Option(
            name="precision",
            kind=TEXT,
            choices=tuple(PRECISIONS),
            help=f"precision of the published file (default: {FP32.name}); {_list_helps(PRECISIONS)}",
        ),
        default=FP32.name,
        group=_PROOF,
    )
    engine: str | None = declare(
        Option(
            name="engine",
            kind=TEXT,
            choices=(*ENGINES, AUTO),
            help=f"what runs it (default: the first that can); {_list_helps(ENGINES)}; {AUTO}: the fastest on "
            "this CPU that is proven in this precision",
        ),
        default=None,
        group=_PROOF,
    )
    steps: str = declare(
        Option(
            name="steps",
            kind=TEXT,
            choices=tuple(LAYOUTS),
            help="what stands around it (default: ensemble); "
            + "; ".join(f"{name}: {text}" for name, text in LAYOUTS.items()),
        ),
        default=ENSEMBLE,
        group=_PROOF,
    )
    lengths: tuple[int, ...] = declare(
        Option(
            name="lengths",
            kind=COUNTS,
            help="lengths in tokens that texts are padded to, so that requests of different lengths are run together, "
            "as in --lengths 32 64 128 (default: no request is padded for others)",
            needs=Needs.ARCHITECTURE,
        ),
        default=(),
        group=_PROOF,
    )
    batching: str = declare(
        Option(
            name="batching",
            kind=TEXT,
            choices=tuple(BATCHINGS),
            help=f"which requests are run together (default: {EQUAL.name}); {_list_helps(BATCHINGS)}",
            needs=Needs.ARCHITECTURE,
        ),
        default=EQUAL.name,
        group=_PROOF,
    )
    tolerances: Mapping[str, float] = declare(
        Option(
            name="tolerances",
            flag="--tolerance",
            kind=BOUNDS,
            help="another bound for the verification, such as max_abs_error=1e-6; a wider one needs --accept-worse",
        ),
        default_factory=dict,
        group=_PROOF,
    )
    accept_worse: str | None = declare(
        Option(
            name="accept_worse",
            kind=TEXT,
            metavar="REASON",
            help="accept wider bounds; the report states the reason",
        ),
        default=None,
        group=_PROOF,
    )
    factory: str | None = declare(
        Option(
            name="factory",
            kind=TEXT,
            metavar="ENTRY",
            help="function that builds the module, as package.module:function or file.py:function; it is run",
        ),
        default=None,
        group=_PROOF,
    )
    inputs: Path | None = declare(
        Option(
            name="inputs",
            kind=PATH,
            metavar="FILE",
            help="JSON that describes that module's inputs and outputs",
            needs=Needs.FACTORY,
        ),
        default=None,
        group=_PROOF,
    )
    vocabulary: VocabularyOptions = field(default_factory=VocabularyOptions)
    serving: ServingOptions = field(default_factory=ServingOptions)
    variants: Mapping[str, ServingOptions] = field(default_factory=dict)
    task_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.task_options) - {option.name for option in list_task_options()})
        assert not unknown, f"Bug: no task has the options {unknown}"
        every = {option.name: None for option in list_task_options()}
        object.__setattr__(self, "task_options", every | dict(self.task_options))
        if self.factory is None and self.checkpoint is None:
            raise SettingsError("there is nothing to export", expected="a CHECKPOINT or --factory", got="neither")
        asked = [option for option in list_task_options() if self.task_options[option.name] is not None]
        _refuse_idle([*list_changed(self), *list_changed(self.vocabulary), *asked], self.checkpoint, self.factory)
        _refuse_idle_seed(self.vocabulary)
        named = ENGINES.get(self.engine or "")
        if self.steps == LEAN and named and not named.has_lean:
            raise SettingsError(
                f"--steps {LEAN} has no effect with --engine {named.name}",
                expected="one of " + ", ".join(name for name, engine in ENGINES.items() if engine.has_lean),
                got=named.name,
                remedy="leave it out",
            )
        self._check_batching()
        if self.factory is not None and self.inputs is None:
            raise SettingsError("the factory's inputs are not described", expected="--inputs FILE", got="none")

    def _check_batching(self) -> None:
        """Refuse ways of running requests together that have no effect.

        Raises:
            SettingsError: One of them.
        """
        joining = {"--lengths": bool(self.lengths), f"--batching {self.batching}": self.batching != EQUAL.name}
        asked = [option for option, is_asked in joining.items() if is_asked]
        if self.steps == LEAN and asked:
            raise SettingsError(
                f"{asked[0]} has no effect with --steps {LEAN}",
                expected=f"--steps {ENSEMBLE}, whose requests are joined",
                got=LEAN,
                remedy="leave it out",
            )
        if len(asked) > 1:
            raise SettingsError(
                f"--lengths has no effect with --batching {self.batching}",
                expected="one way of running texts of different lengths together",
                got=f"--lengths {' '.join(map(str, self.lengths))}",
                remedy="leave it out",
            )
        if (
            self.batching != EQUAL.name
            and self.engine
            and not (self.engine in ENGINES and ENGINES[self.engine].has_ragged)
        ):
            raise SettingsError(
                f"--batching {self.batching} has no effect with --engine {self.engine}",
                expected="one of " + ", ".join(name for name, engine in ENGINES.items() if engine.has_ragged),
                got=self.engine,
                remedy="leave it out, or pass --lengths, for which every engine will do",
            )

    @property
    def form(self) -> Form:
        """What an engine will be given, as far as that is known before anything is read."""
        if named := ENGINES.get(self.engine or ""):
            return named.takes
        return TASKS[self.task].form if self.task else "graph"


def list_options() -> list[Option]:
    """Return every option, in the order of `--help`."""
    declared = [*fields(ExportRequest), *fields(VocabularyOptions), *fields(ServingOptions)]
    return [option for item in declared for option in _options_of(item)] + list_task_options()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option to a command line; what is not given there is None."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for option in list_options():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        option.add_to(groups[option.group])


def add_vocabulary_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the vocabulary alone."""
    group = parser.add_argument_group(VOCABULARY_GROUP)
    for declared in fields(VocabularyOptions):
        for option in _options_of(declared):
            option.add_to(group)


def build_vocabulary_options(arguments: Mapping[str, Any]) -> VocabularyOptions | None:
    """Return what the command line asks of the vocabulary, or None where it asks for no change.

    Args:
        arguments: Option → its value or items, None where it was not given.

    Raises:
        SettingsError: An option has no effect for want of a change.
    """
    options = VocabularyOptions(**_fill(VocabularyOptions, arguments, {}))
    _refuse_idle_seed(options)
    unchanged = VocabularyOptions(allow_other_tokenizer=options.allow_other_tokenizer)
    return None if options == unchanged else options


def read_options(path: Path | None, name: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return option → its value for the model `name`, or the list of its items, from a file.

    Args:
        path: JSON, or TOML with tables of models; None for the `modelyard.toml` of the working directory, if any.
        name: The model.
        tell: Called where the file names models, and this one is not among them.

    Raises:
        SettingsError: The file cannot be read, or holds a key or a value that cannot be used.
    """
    if path is None and not os.path.lexists(OPTIONS_FILE):
        return {}
    variable = [option for item in fields(ServingOptions) for option in _options_of(item)]
    return read_file(path or Path(OPTIONS_FILE), name, list_options(), variable, tell)


def build_request(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> ExportRequest:
    """Return what was asked for; the command line wins over the file, and adds its items to the file's.

    Args:
        arguments: Option → its value or items on the command line, None where it was not given; `checkpoint`, `name`,
            `address`.
        settings: The same of the file.

    Raises:
        SettingsError: An option has no effect beside or without another, or an adapter is named twice.
    """
    chosen = _fill(ExportRequest, arguments, settings)
    # What was given as it would be anyway has no effect either.
    given = [option for option in list_options() if _is_given(option, _choose(option, arguments, settings))]
    _refuse_idle(given, arguments["checkpoint"], chosen.get("factory"))
    _refuse_twice(chosen.get("adapters", ()))
    return ExportRequest(
        checkpoint=arguments["checkpoint"],
        name=arguments["name"],
        address=arguments.get("address", ""),
        vocabulary=VocabularyOptions(**_fill(VocabularyOptions, arguments, settings)),
        serving=ServingOptions(**_fill(ServingOptions, arguments, settings)),
        variants={
            name: ServingOptions(**_fill(ServingOptions, _leave_out(arguments, others), {**settings, **others}))
            for name, others in settings.get(VARIANTS, {}).items()
        },
        task_options={option.name: _choose(option, arguments, settings) for option in list_task_options()},
        **chosen,
    )


def _refuse_twice(adapters: Sequence[Path]) -> None:
    """Refuse to merge an adapter twice, which would double what it was trained to change.

    Raises:
        SettingsError: One is named twice, in the file and on the command line perhaps.
    """
    found: dict[str, Path] = {}
    for path in adapters:
        if other := found.get(real := os.path.realpath(path)):
            raise SettingsError(
                f"the adapter {path} is named twice",
                expected="each adapter once",
                got=f"{other} as well" if other != path else "it twice",
                remedy="leave one of them out",
            )
        found[real] = path


def list_changed(holder: Any) -> list[Option]:
    """Return the options whose fields in a request, or in a part of it, are not as they would be without them."""
    changed: list[Option] = []
    for declared in fields(holder):
        default = declared.default if declared.default_factory is MISSING else declared.default_factory()
        if getattr(holder, declared.name) != default:
            changed += _options_of(declared)[:1]
    return changed


def spell_options(recorded: Mapping[str, Any], without: Collection[str] = ()) -> list[str]:
    """Return the words of a command line that ask once more for what a lock records beside the defaults.

    Args:
        recorded: Options as a lock has them, in which a path is its last name alone.
        without: Fields that are not asked for, such as how a model is served.
    """
    words = []
    parts = ((ExportRequest, ""), (VocabularyOptions, "vocabulary"), (ServingOptions, "serving"))
    for holder, key in parts:
        part = recorded.get(key, {}) if key else recorded
        for declared in fields(holder):
            default = declared.default if declared.default_factory is MISSING else declared.default_factory()
            # JSON has lists for tuples.
            usual = list(default) if isinstance(default, tuple) else default
            value = part.get(declared.name, usual)
            if declared.name not in without and value != usual:
                words += [word for option in _options_of(declared) for word in _spell(option, value)]
    asked = recorded.get("task_options", {})
    given = (option for option in list_task_options() if asked.get(option.name) is not None)
    return words + [word for option in given for word in _spell(option, asked[option.name])]


def _spell(option: Option, value: Any) -> list[str]:
    """Return the words that give an option the value that a lock records."""
    if isinstance(value, bool):
        return [option.flag if value else f"--no-{option.flag.removeprefix('--')}"]
    if isinstance(value, Mapping):
        items = [f"{name}={item}" for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        # Two options fill this field.
        added = [AddedToken(**item) for item in value]
        items = [spelt for item in added if item == option.kind.parse(spelt := f"{item.token}={item.initializer}")]
    else:
        items = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return [option.flag, *items] if items else []


def _options_of(declared: "Field[Any]") -> tuple[Option, ...]:
    options: tuple[Option, ...] = declared.metadata.get("options", ())
    return options


def _is_given(option: Option, value: Any) -> bool:
    """Tell whether anything was asked for: a flag that is not turned on, or an empty list, asks for nothing."""
    return value is not None and value != [] and not (option.kind is FLAG and value is False)


def _choose(option: Option, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    given = arguments.get(option.name)
    return settings.get(option.name) if given is None else given


def _leave_out(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key not in others}


def _fill(holder: type, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return field → its value, for every field of `holder` that an option was given for."""
    filled = {}
    for declared in fields(holder):
        options = _options_of(declared)
        if not any(_choose(option, arguments, settings) is not None for option in options):
            continue
        collect = options[0].kind.collect
        if collect is None:
            filled[declared.name] = _choose(options[0], arguments, settings)
        else:
            given = [source.get(option.name) or [] for source in (settings, arguments) for option in options]
            filled[declared.name] = collect([item for items in given for item in items])
    return filled


def _refuse_idle(given: Sequence[Option], checkpoint: Path | None, factory: str | None) -> None:
    """Refuse options that have no effect, all of one reason in one sentence."""
    beside = "none" if factory is None else f"--factory {factory}"
    reasons = {
        Needs.ARCHITECTURE: (factory is None, "a checkpoint that transformers builds the model of", beside),
        Needs.FACTORY: (factory is not None, "--factory ENTRY", beside),
        Needs.CHECKPOINT: (checkpoint is not None, "the weights of a CHECKPOINT", "none"),
    }
    for needs, (is_met, expected, got) in reasons.items():
        flags = [option.flag for option in given if option.needs is needs]
        if flags and not is_met:
            one = len(flags) == 1
            raise SettingsError(
                f"{', '.join(flags)} {'has' if one else 'have'} no effect {needs.value}",
                expected=expected,
                got=got,
                remedy=f"leave {'it' if one else 'them'} out",
            )


def _refuse_idle_seed(vocabulary: VocabularyOptions) -> None:
    """Refuse a seed where no row is begun with it: rows that pad the tables are their mean."""
    if vocabulary.seed and not vocabulary.added_tokens:
        raise SettingsError("--seed has no effect alone", expected="tokens to add", got="none", remedy="leave it out")
