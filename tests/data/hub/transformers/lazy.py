"""Lazy packages, as transformers has them: names resolve on first access and stay."""

import importlib
import sys
from types import ModuleType


class _LazyModule(ModuleType):
    def __init__(self, module, class_to_module):
        super().__init__(module.__name__)
        self.__dict__.update({k: v for k, v in vars(module).items() if k.startswith("__")})
        self._class_to_module = class_to_module

    def __getattr__(self, name):
        if name not in self._class_to_module:
            raise AttributeError(f"module {self.__name__} has no attribute {name}")
        value = getattr(importlib.import_module("." + self._class_to_module[name], self.__name__), name)
        setattr(self, name, value)
        return value


def make_lazy(name, class_to_module):
    sys.modules[name] = _LazyModule(sys.modules[name], class_to_module)
