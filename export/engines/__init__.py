# SPDX-License-Identifier: Apache-2.0
"""ONNX graphs of a bundle -> TensorRT and TensorRT-RTX engines."""
