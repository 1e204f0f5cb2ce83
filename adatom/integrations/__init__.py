"""Host frameworks; each module is imported when it is first asked for, as it imports its framework."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("transformers", "transformers_moe"):
        return importlib.import_module(f"adatom.integrations.{name}")
    raise AttributeError(f"module 'adatom.integrations' has no attribute {name!r}")
