# SPDX-License-Identifier: Apache-2.0
"""Verification as an operator: specification, ONNX functions, Triton kernels, TensorRT plugins.

`specification` says what is computed, `contract` names the tensors, `verify_model` and `attach` build graphs,
`kernel_launch` runs torch tensors on a GPU. Modules import their libraries, this package none.
"""
