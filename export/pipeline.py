"""The one straight line: checkpoint, vocabulary, torch model, ONNX file, proof, published version."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from export import vocabulary
from export.checkpoints import StateDict, StoredCheckpoint, open_checkpoint
from export.errors import VerificationError
from export.model_config import EnsembleNames
from export.onnx_export import export_onnx
from export.progress import Progress
from export.repository import Publication, check_contract, check_name, publish
from export.request import ExportRequest
from export.signature import ModelSignature
from export.targets import DEFAULT_TARGET
from export.tasks import PoolingSettings, SentenceEmbedding, build_signature, read_pooling
from export.torch_model import find_input_embedding, load_config, load_model
from export.transforms import CastToFloat32
from export.verify import VerificationReport, verify

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Source:
    """The checkpoint as it is to be served: the truth that the ONNX file is compared with."""

    checkpoint: StoredCheckpoint
    tokenizer: PreTrainedTokenizerBase
    module: SentenceEmbedding
    signature: ModelSignature
    pooling: PoolingSettings
    parameters: int
    rows_before: int
    rows_after: int
    tokens_added: list[str]
    left_out: list[str]


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What came of it, for the summary."""

    source: Source
    model_bytes: int
    report: VerificationReport
    publication: Publication


def load_source(request: ExportRequest, progress: Progress) -> Source:
    """Read a checkpoint, bring tokenizer and embedding rows together, and build the module around the model.

    Raises:
        ExportError: With the one reason.
    """
    with progress.step("reading checkpoint and vocabulary"):
        checkpoint = open_checkpoint(request.checkpoint, tag=request.tag, allow_non_finite=request.allow_non_finite)
        directory = request.base or checkpoint.directory
        config = load_config(directory, checkpoint.config)
        tokenizer = vocabulary.load_tokenizer(directory)
        weights: StateDict = CastToFloat32(source=checkpoint)
        table = find_input_embedding(config, weights.specs())
        rows_before = weights.specs()[table].shape[0]
        vocabulary.check_ids_have_rows(tokenizer, rows_before, table)
        new_tokens = vocabulary.add_special_tokens(tokenizer, request.added_tokens)
        weights = vocabulary.assign_new_rows(weights, table, tokenizer, new_tokens)
        config.vocab_size = weights.specs()[table].shape[0]
        pooling = read_pooling(directory)
        max_length = vocabulary.read_max_length(directory, tokenizer, config)
    parameters = sum(spec.numel for spec in weights.specs().values() if spec.dtype.is_floating_point)
    with progress.step(f"loading {parameters / 1e6:.1f} M parameters"):
        model, left_out = load_model(config, weights)
        signature = build_signature(tokenizer, model, config, max_length)
        module = SentenceEmbedding(model, pooling, tuple(tensor.name for tensor in signature.inputs))
    return Source(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        module=module.eval(),
        signature=signature,
        pooling=pooling,
        parameters=parameters,
        rows_before=rows_before,
        rows_after=config.vocab_size,
        tokens_added=[item.token for item in new_tokens],
        left_out=left_out,
    )


def run_export(
    request: ExportRequest, progress: Progress, on_report: Callable[[VerificationReport], None]
) -> ExportResult:
    """Take a checkpoint to a published version, or refuse and leave the repository as it was.

    Args:
        request: What to do.
        progress: Told of every step.
        on_report: Called with the verification report before it is judged.

    Raises:
        ExportError: With the one reason.
    """
    check_name(request.name)
    names = EnsembleNames(ensemble=request.name)
    source = load_source(request, progress)
    check_contract(request.repository, names, source.signature)
    with tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
        model_file, tokenizer_file = Path(folder, "model", "model.onnx"), Path(folder, "tokenizer.json")
        model_file.parent.mkdir()
        with progress.step("exporting to ONNX"):
            max_length = source.signature.max_length
            vocabulary.build_server_tokenizer(source.tokenizer, max_length).save(str(tokenizer_file))
            export_onnx(source.module, source.signature, model_file, DEFAULT_TARGET)
        with progress.step("verifying against the checkpoint") as tell:
            report = verify(
                module=source.module,
                signature=source.signature,
                model_file=model_file,
                tokenizer=source.tokenizer,
                tokenizer_file=tokenizer_file,
                added_tokens=[item.token for item in request.added_tokens],
                target=DEFAULT_TARGET,
                on_case=tell,
            )
        on_report(report)
        _require_passed(report)
        model_files = sorted(model_file.parent.iterdir())
        model_bytes = sum(path.stat().st_size for path in model_files)
        with progress.step("publishing"):
            publication = publish(
                repository=request.repository,
                names=names,
                signature=source.signature,
                model_files=model_files,
                tokenizer_file=tokenizer_file,
                report=report,
            )
    return ExportResult(source=source, model_bytes=model_bytes, report=report, publication=publication)


def _require_passed(report: VerificationReport) -> None:
    failed = [case for case in report.cases if not case.passed]
    if failed:
        raise VerificationError(
            f"the ONNX model is not equal to the checkpoint in {len(failed)} of {len(report.cases)} cases, "
            f"worst in {report.worst.name!r}",
            expected="a maximum absolute error <= 1e-05 and a cosine >= 0.999999",
            got=f"{report.worst.max_abs_error:.2e} and {report.worst.min_cosine:.7f}",
            remedy="nothing was published; see every case in the table above",
        )
