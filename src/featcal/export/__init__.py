"""A calibrated model as a file that others serve: `torch.export` programs and ONNX.

Both hold one function, inputs -> logits, for any number of rows. An ONNX file is compared with the
model in ONNX Runtime before it takes its name; see `docs/export.md`.
"""

from featcal.export.onnx_file import OnnxExport, Parity, onnx, program

__all__ = ["OnnxExport", "Parity", "onnx", "program"]
