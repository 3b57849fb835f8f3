#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Everything a GPU has to prove, in one command that ends inside six minutes. Needs torch, triton, numpy and onnx;
# nothing is installed. The report goes to gpu_check.json, see docs/gpu.md.
#
#   scripts/gpu_check.sh                       all parts on the first GPU
#   scripts/gpu_check.sh --skip latency        without one
#   scripts/gpu_check.sh --device cpu --small  the flow alone, kernels in Triton's interpreter
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m gpu_check "$@"
