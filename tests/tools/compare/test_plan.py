"""`veomni-hook plan`: a script's first step is predicted and not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.compare.test_command import ROOT  # noqa: F401 - where the package is
from tests.tools.cli.printed import veomni_hook
