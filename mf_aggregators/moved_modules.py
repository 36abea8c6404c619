"""Modules that were moved are still imported by the names that they had."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType


def install(moved: Mapping[str, str]) -> None:
    """Lets Python find modules by earlier names.

    The module of an earlier name is the same object, so that classes and functions have one
    identity under both. It is imported when it is first asked for.

    Args:
      moved: The present dotted name of each module, by its earlier one.
    """
    if not any(isinstance(each, _Finder) and each.moved == moved for each in sys.meta_path):
        sys.meta_path.append(_Finder(moved))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = dict(moved)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a module by its earlier name."""
        del path, target
        if fullname not in self.moved:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Imports the module by its present name."""
        module = importlib.import_module(self.moved[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it was: the import system has given it another specification."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
