# SPDX-License-Identifier: Apache-2.0
"""dspark-trt: deploy DSpark speculative decoding."""

__version__ = "0.1.0"
