"""What the kernel has checked is not altered afterwards."""

import dataclasses
import importlib
import pathlib

import pytest

from mf_aggregators import kernel

_MODULES = sorted(path.stem for path in pathlib.Path(kernel.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("module", _MODULES)
def test_values_of_the_kernel_cannot_be_altered(module: str) -> None:
    name = f"{kernel.__name__}.{module}"
    for kind in vars(importlib.import_module(name)).values():
        if isinstance(kind, type) and kind.__module__ == name and dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                with pytest.raises(AttributeError, match="cannot"):
                    setattr(object.__new__(kind), field.name, 1)
