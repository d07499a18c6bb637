"""What can be asked of the tokenizer and the rows that belong to it. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError
from ..option_kinds import COUNT, FLAG, INTEGER, TEXT, Kind, Needs, Option, declare, read_pairs

VOCABULARY_GROUP = "vocabulary options"

_COMMON: dict[str, Any] = {"group": VOCABULARY_GROUP, "needs": Needs.ARCHITECTURE}


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token that the export adds.

    Attributes:
        token: Its text, such as `[ENT_START]`.
        initializer: What its rows start as: `zeros`, `copy:TOKEN`, `mean:DESCRIPTION` (of the description's tokens),
            `mean` (of the whole table) or `random`. Anything else is a description.
        special: Whether it keeps its case and is never split, as transformers' `add_special_tokens` makes it;
            otherwise as `add_tokens` does.
    """

    token: str
    initializer: str = "mean"
    special: bool = True


def _tokens(*, special: bool) -> Kind:
    def make(token: str, initializer: Any) -> AddedToken:
        if not isinstance(initializer, str) or not token.strip() or not initializer.strip():
            raise ValueError
        return AddedToken(token=token, initializer=initializer, special=special)

    def parse(word: str) -> AddedToken:
        token, _, initializer = word.partition("=")
        if "=" in initializer:
            # Of the token or of how it starts: only a file tells them apart.
            raise ValueError
        return make(token, initializer)

    expected = (
        "tokens, each TOKEN=INITIALIZER with one = on the command line, and an initializer under its text in a file"
    )
    return Kind(expected=expected, parse=parse, read=read_pairs(make), metavar="TOKEN=INITIALIZER", collect=tuple)


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """What becomes of the tokenizer and the rows that belong to it.

    Attributes:
        added_tokens: Tokens to add, in the order of their ids.
        unused_rows: Whether rows beyond the tokenizer stay (`keep`) or go (`cut`).
        pad_to_multiple_of: What the number of rows is padded to, with rows that are the table's mean.
        seed: Seed of `random` rows.
        allow_other_tokenizer: Whether to accept a tokenizer that seems to belong to another model.
    """

    added_tokens: tuple[AddedToken, ...] = declare(
        Option(
            name="add_special_tokens",
            flag="--add-special-token",
            kind=_tokens(special=True),
            help="tokens to add, kept in their case and never split; each starts as zeros, mean, random, copy:TOKEN or "
            "the mean of a description",
        ),
        Option(
            name="add_tokens",
            flag="--add-token",
            kind=_tokens(special=False),
            help="tokens to add, ordinary; they start in the same ways",
        ),
        default=(),
        **_COMMON,
    )
    pad_to_multiple_of: int = declare(
        Option(name="pad_vocab_to_multiple_of", kind=COUNT, help="pad the number of rows"), default=1, **_COMMON
    )
    unused_rows: str = declare(
        Option(
            name="unused_rows",
            kind=TEXT,
            choices=("keep", "cut"),
            help="what happens to rows beyond the tokenizer (default: keep)",
        ),
        default="keep",
        **_COMMON,
    )
    seed: int = declare(
        Option(name="seed", kind=INTEGER, help="seed of random rows (default: 0)"), default=0, **_COMMON
    )
    allow_other_tokenizer: bool = declare(
        Option(
            name="allow_other_tokenizer",
            kind=FLAG,
            help="accept a tokenizer whose special ids or vocabulary differ from what config.json says",
        ),
        default=False,
        **_COMMON,
    )

    def __post_init__(self) -> None:
        """Refuse a token that is to be added twice: it would be of one kind and start as another.

        Raises:
            SettingsError: One is.
        """
        asked: dict[str, AddedToken] = {}
        for added in self.added_tokens:
            if (other := asked.setdefault(added.token, added)) is not added:
                raise SettingsError(
                    f"the token {added.token!r} is to be added twice",
                    expected="each token once, special or ordinary",
                    got=" and ".join(
                        f"{each.initializer!r}, {'special' if each.special else 'ordinary'}" for each in (other, added)
                    ),
                    remedy="leave one of them out",
                )
