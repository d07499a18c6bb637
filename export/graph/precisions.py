"""The precisions that a graph is published in, one entry each. Imports nothing heavy, so that `--help` answers at once.

How a graph is written in one of them is in the module of this folder that its entry names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# How good a lossy file is: the cosine of each row with the true one, or in how many rows the same label wins.
COSINE = "cosine"
LABEL_AGREEMENT = "label_agreement"

# How much larger the perplexity of real texts is, in parts of what it was.
PERPLEXITY_RISE = "max_perplexity_rise"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One precision of the published graph.

    Attributes:
        name: What `--precision` takes, and what reports record.
        help: What it is good for, for `--help`.
        module: Module of this folder whose function `write` converts the verified fp32 graph; empty where there is
            nothing to convert.
        thresholds: Metric of quality → what a file must hold, unless the user asks for something else. Metrics that are
            not named stay as strict as in fp32.
        error_factor: What a largest error of fp32 is multiplied by; None where single values may be off by anything, so
            that the quality alone is judged.
        writing: Error → bound of a model that writes texts, as its engine runs it; empty where none does.
        real_inputs_only: Whether only inputs such as users send are judged, and not ids that no text has.
        is_for_gpus: Whether a GPU computes in it where a CPU, and so the proof, computes in fp32 and is less far off.
        shares_scales: Whether activations are scaled by the largest in a batch, so that its rows move each other.
    """

    name: str
    help: str
    module: str = ""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    error_factor: float | None = 1.0
    writing: Mapping[str, float] = field(default_factory=dict)
    real_inputs_only: bool = False
    is_for_gpus: bool = False
    shares_scales: bool = False

    @property
    def converts(self) -> bool:
        """Whether the graph is another one than in fp32."""
        return bool(self.module)


FP32 = Precision(name="fp32", help="as trained")

# Error factors: fp16 has 11 bits, bf16 8 where fp32 has 24; the sums of a whole model make up for some of it. A wrong
# weight, mask or pooling is still far beyond. Thresholds: fp16 rounds by 5e-4, bf16 by 4e-3, each time another way, and
# so the direction of a vector moves far less. Of all-MiniLM-L6-v2, on text in several languages, everything in int8
# holds a cosine of 0.969; 0.99 keeps a quarter of the nodes in fp32.
PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        FP32,
        Precision(
            name="fp16",
            help="half the size, for GPUs",
            module="fp16",
            thresholds={COSINE: 0.9999, LABEL_AGREEMENT: 0.99},
            error_factor=100.0,
            is_for_gpus=True,
        ),
        Precision(
            name="bf16",
            help="weights of half the size, fp32 arithmetic",
            module="bf16",
            thresholds={COSINE: 0.999, LABEL_AGREEMENT: 0.99},
            error_factor=2000.0,
            writing={"max_relative_error": 0.05, "min_label_agreement": 0.97, PERPLEXITY_RISE: 0.02},
        ),
        Precision(
            name="int8",
            help="a quarter of the size, the fastest on CPUs, the most sensitive parts in fp32",
            module="int8",
            thresholds={COSINE: 0.99, LABEL_AGREEMENT: 0.98},
            error_factor=None,
            writing={"max_relative_error": 0.1, "min_label_agreement": 0.95, PERPLEXITY_RISE: 0.05},
            real_inputs_only=True,
            shares_scales=True,
        ),
    )
}
