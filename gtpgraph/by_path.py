"""Pickling and importing by file, for functions whose module a fresh interpreter cannot import.

In: an object; functions and classes of user files in it travel as (module, file, qualified name).
Out: bytes, or the object again in a process that executes those files under the same names.
Scripts, and test modules under pytest's importlib mode, need this; installed modules do not.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
import types
from pathlib import Path
from typing import Any


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not isinstance(obj, types.FunctionType | type):
            return None
        module = sys.modules.get(obj.__module__)
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py") or _is_installed(obj.__module__, file):
            return None
        if "<" in obj.__qualname__:
            raise ValueError(
                f"{obj.__qualname__} of {file} cannot be sent to a rank: expected a module-level "
                "function or class, got one defined inside a function; move it to the module."
            )
        return obj.__module__, str(Path(file).resolve()), obj.__qualname__


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        module, file, qualname = pid
        found: Any = module_at(module, file)
        for name in qualname.split("."):
            found = getattr(found, name)
        return found


def _is_installed(module: str, file: str) -> bool:
    """Whether a fresh interpreter imports ``module`` by its name."""
    package = module.partition(".")[0]
    return (
        package in ("gtpgraph", "torch")
        or package in sys.stdlib_module_names
        or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    )


def module_at(name: str, file: str) -> types.ModuleType:
    """Return module ``name``, executing ``file`` under that name when nothing imports it."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin and Path(spec.origin).resolve() == Path(file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the sender checked that it is a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def dumps(value: Any) -> bytes:
    """Pickle ``value``; ValueError names a function or class that is not at module level."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Undo `dumps`, in any process that sees the same files."""
    return _Unpickler(io.BytesIO(data)).load()
