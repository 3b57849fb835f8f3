# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server over `AsyncEngine`. Start with `app.create_app`; needs the extra `serve`."""
