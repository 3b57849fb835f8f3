# SPDX-License-Identifier: Apache-2.0
"""Targets that a bundle does not contain: a host's own, or a transformers model."""
