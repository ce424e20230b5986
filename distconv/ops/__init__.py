"""Rules of torch functions on DistTensors, one folder a family; importing this registers them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
