"""Has FlopCounterMode count adatom's operators (bench/flops.py). Its module takes longer to import than adatom, so a
finder waits for that import, adds what is to be counted, and is gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_COUNTER = "torch.utils.flop_counter"


class _Later:
    """A finder of modules that finds one, once, and registers what it counts when it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """None for any other module."""
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then(module: Any) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = then  # type: ignore[method-assign]
        return spec


def _register(counter: Any) -> None:
    importlib.import_module("adatom.bench.flops").register(counter)


def register() -> None:
    """From when its module is imported; at once if it is."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _Later())
