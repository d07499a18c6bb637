"""What every peer is given: the same graph and the same tokenizer, read as a Python script reads them.

It counts what it runs in a file of the process's own, so that joining and padding can be told from outside.
"""

import mmap
import os
import struct
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

# Runs, rows, tokens of the texts, tokens with their padding.
COUNTS = struct.Struct("<4q")


class Embedder:
    """Texts to vectors.

    Args:
        threads: Of one run; 0 leaves ONNX Runtime its usual number.
    """

    def __init__(self, threads: int = 0) -> None:
        folder = Path(os.environ["BENCH_MODEL"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_padding(pad_id=self.tokenizer.padding["pad_id"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.input_names = [tensor.name for tensor in self.session.get_inputs()]
        counts = Path(os.environ["BENCH_COUNTS"], str(os.getpid()))
        counts.write_bytes(bytes(COUNTS.size))
        with counts.open("r+b") as file:
            self.counts = mmap.mmap(file.fileno(), COUNTS.size)

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return a vector of each text, [texts, size]; they run as one batch, padded to the longest."""
        encodings = self.tokenizer.encode_batch(texts)
        tensors = {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
            "token_type_ids": np.array([encoding.type_ids for encoding in encodings], np.int64),
        }
        mask = tensors["attention_mask"]
        counted = np.frombuffer(self.counts, np.int64)
        counted += [1, len(texts), int(mask.sum()), mask.size]
        return self.session.run(None, {name: tensors[name] for name in self.input_names})[0]
