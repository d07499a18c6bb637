"""The ONNX graph: written from a torch module, and converted to other precisions."""
