"""Hypothesis tries the same examples everywhere, so that a change that passes once passes again.

``HYPOTHESIS_PROFILE=explore python -m pytest`` looks for new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
