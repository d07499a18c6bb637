"""How a version is to be served: queues, instances, priorities and the like. Imports nothing heavy.

None of it changes an answer, so none of it is proven: it becomes a part of the version's configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SettingsError
from .option_kinds import COUNT, COUNTS, FLAG, MAX_WORKERS, TEXT, Option, bounded_count, declare, named_counts

_COMMON: dict[str, Any] = {"group": "serving options, for tables of modelyard.toml as well"}

TIMEOUT_ACTIONS = ("reject", "delay")

# tritonserver makes a queue of each.
MAX_PRIORITY_LEVELS = 100

# As much as a machine of 16 TiB has.
MAX_KV_CACHE_MB = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """What clients and operators want of the server, where that is not what modelyard would choose.

    Attributes:
        instances: Copies of the graph that run at the same time.
        threads: Threads of one of them.
        max_queue_size: Requests that may wait in front of each step.
        max_queue_delay_microseconds: How long the graph waits for requests that it may join.
        default_timeout_microseconds: How long a request may wait in front of each step; a request may say less.
        timeout_action: What becomes of one that waited longer, one of `TIMEOUT_ACTIONS`.
        priority_levels: How many priorities a request may say; 1 is the highest.
        default_priority_level: Priority of a request that says none; the lowest where None.
        prefetch: Whether requests are handed to the instances ahead, from queues without a limit, time-outs and
            priorities.
        response_cache: Whether answers are kept for requests that are the same to the byte.
        warmup: Lengths, in tokens, of texts that each instance answers before it is ready, besides the shortest and the
            longest.
        kv_cache_mb: Memory for keys and values of all texts that are being written, in MiB.
        max_num_seqs: Texts that are written at the same time.
        rate_limit: Resource → how much of it an execution of the graph takes.
    """

    instances: int | None = declare(
        Option(
            name="instances",
            kind=bounded_count(MAX_WORKERS),
            help="copies of the graph that run at the same time (default: 2)",
        ),
        default=None,
        **_COMMON,
    )
    threads: int | None = declare(
        Option(
            name="threads",
            kind=bounded_count(MAX_WORKERS),
            help="threads of one copy of the graph, in ONNX Runtime or --steps lean (default: 1)",
        ),
        default=None,
        **_COMMON,
    )
    max_queue_size: int | None = declare(
        Option(
            name="max_queue_size",
            kind=COUNT,
            help="requests that may wait in front of each step, beyond which they are refused (default: 256)",
        ),
        default=None,
        **_COMMON,
    )
    max_queue_delay_microseconds: int | None = declare(
        Option(
            name="max_queue_delay_microseconds",
            kind=COUNT,
            metavar="US",
            help="how long the graph waits for requests that it may join (default: not at all)",
        ),
        default=None,
        **_COMMON,
    )
    default_timeout_microseconds: int | None = declare(
        Option(
            name="default_timeout_microseconds",
            kind=COUNT,
            metavar="US",
            help="how long a request may wait in front of each step (default: until it is answered)",
        ),
        default=None,
        **_COMMON,
    )
    timeout_action: str | None = declare(
        Option(
            name="timeout_action",
            kind=TEXT,
            choices=TIMEOUT_ACTIONS,
            help="what becomes of a request that waited longer than that, or than it says itself (default: reject)",
        ),
        default=None,
        **_COMMON,
    )
    priority_levels: int | None = declare(
        Option(name="priority_levels", kind=COUNT, help="priorities that a request may say, 1 being the highest"),
        default=None,
        **_COMMON,
    )
    default_priority_level: int | None = declare(
        Option(
            name="default_priority_level",
            kind=COUNT,
            help="priority of a request that says none (default: the lowest)",
        ),
        default=None,
        **_COMMON,
    )
    prefetch: bool = declare(
        Option(
            name="prefetch",
            kind=FLAG,
            help="hand requests to the instances ahead: more answers a second of small models, from queues that have "
            "no limit and know no time-outs",
        ),
        default=False,
        **_COMMON,
    )
    response_cache: bool = declare(
        Option(
            name="response_cache",
            kind=FLAG,
            help="keep answers for requests that are the same to the byte",
        ),
        default=False,
        **_COMMON,
    )
    warmup: tuple[int, ...] = declare(
        Option(
            name="warmup",
            kind=COUNTS,
            metavar="TOKENS",
            help="lengths of texts that each instance answers before it is ready, besides the shortest and the longest",
        ),
        default=(),
        **_COMMON,
    )
    kv_cache_mb: int | None = declare(
        Option(
            name="kv_cache_mb",
            kind=bounded_count(MAX_KV_CACHE_MB),
            metavar="MB",
            help="memory for keys and values of all texts that are being written, in MiB (default: 1024)",
        ),
        default=None,
        **_COMMON,
    )
    max_num_seqs: int | None = declare(
        Option(
            name="max_num_seqs",
            kind=bounded_count(MAX_WORKERS),
            help="texts that are written at the same time; others wait (default: 64)",
        ),
        default=None,
        **_COMMON,
    )
    rate_limit: Mapping[str, int] = declare(
        Option(
            name="rate_limit",
            kind=named_counts("resources", "RESOURCE=N"),
            help="what an execution of the graph takes of resources that models share; no more run than there is for",
        ),
        default_factory=dict,
        **_COMMON,
    )

    def __post_init__(self) -> None:
        policies = ("max_queue_size", "default_timeout_microseconds", "timeout_action", "priority_levels")
        asked = [name for name in policies if getattr(self, name) is not None]
        if self.prefetch and asked:
            flag = "--" + asked[0].replace("_", "-")
            raise SettingsError(
                f"{flag} has no effect with --prefetch",
                expected="queues in order, without a limit",
                got=f"{flag} {getattr(self, asked[0])}",
                remedy="leave one of the two out",
            )
        levels, default = self.priority_levels, self.default_priority_level
        if levels is not None and levels > MAX_PRIORITY_LEVELS:
            raise SettingsError(
                "--priority-levels is more than are of use",
                expected=f"at most {MAX_PRIORITY_LEVELS}, each of which is a queue",
                got=str(levels),
                remedy="pass fewer",
            )
        if default is not None and levels is None:
            raise SettingsError(
                "--default-priority-level has no effect without --priority-levels",
                expected="how many levels there are",
                got="none",
                remedy="pass --priority-levels as well, or leave it out",
            )
        if default is not None and levels is not None and default > levels:
            raise SettingsError(
                "--default-priority-level is none of the levels",
                expected=f"one from 1 to {levels}",
                got=str(default),
                remedy="pass one of these, or more --priority-levels",
            )
