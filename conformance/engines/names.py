"""The engines by name."""

from __future__ import annotations

import importlib

from conformance.engines.protocol import Engine, EngineError, check

#: Built-in engines by the name that ``--smp-engine`` takes; other engines are ``module:attribute``.
BUILT_IN = {
    "smp": "conformance.engines.smp:ENGINE",
    "ddp": "conformance.engines.ddp:ENGINE",
    "fsdp2": "conformance.engines.fsdp2:FSDP2",
    "hsdp": "conformance.engines.fsdp2:HSDP",
    "tp": "conformance.engines.tp:ENGINE",
    "tensorflow": "conformance.engines.tensorflow:ENGINE",
}


def find_engine(name: str) -> Engine:
    """Import the engine of this name. Raises EngineError, which says what is wrong with the name."""
    place = BUILT_IN.get(name, name)
    module_name, colon, attribute = place.partition(":")
    if not (module_name and colon and attribute):
        known = ", ".join(BUILT_IN)
        raise EngineError(f"engine {name!r}: there is {known}; or give module:attribute")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # any kind: importing runs the code of a third party
        raise EngineError(
            f"engine {name!r}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        raise EngineError(f"engine {name!r}: module {module_name} has no attribute {attribute!r}")
    return check(getattr(module, attribute), name)
