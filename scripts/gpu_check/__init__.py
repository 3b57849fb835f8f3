# SPDX-License-Identifier: Apache-2.0
"""Parts of `scripts/gpu_check.sh`: what has to be seen on a GPU."""
