# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs need decided before anything is captured: buckets, buffers, padding, launches. Pure NumPy."""
