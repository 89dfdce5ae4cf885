"""Stands in for VeOmni's patchgen package in tests: the same names and attributes, written anew.

Configs made with it must be accepted as they are, so nothing here may know veomni_hook.
"""

import enum
from dataclasses import dataclass, field


class PatchType(enum.Enum):
    CLASS_REPLACEMENT = "class_replacement"
    METHOD_OVERRIDE = "method_override"
    FUNCTION_REPLACEMENT = "function_replacement"
    ADDITIONAL_IMPORT = "additional_import"
    INIT_MODIFICATION = "init_modification"


@dataclass
class Patch:
    patch_type: object
    target: str
    replacement: object
    source_module: object = None
    description: object = None
    replacement_source: object = None
    name_map: object = None


@dataclass
class ImportSpec:
    module: str
    names: object = None
    alias: object = None
    is_from_import: bool = True


@dataclass
class PositionedHelper:
    target: str
    helper: object
    placement: str = "after"


@dataclass
class PatchConfig:
    source_module: str
    target_file: str = "patched_modeling.py"
    description: str = ""
    patches: list = field(default_factory=list)
    additional_imports: list = field(default_factory=list)
    post_import_blocks: list = field(default_factory=list)
    helpers: list = field(default_factory=list)
    positioned_helpers: list = field(default_factory=list)
    drop_imported_names: set = field(default_factory=set)
    exclude: list = field(default_factory=list)
    transformers_version: object = None

    def _record(self, kind, target, given, description, name_map=None):
        def keep(thing):
            module = getattr(thing, "__module__", None)
            self.patches.append(Patch(kind, target, thing, module, description, None, name_map))
            return thing

        if given is None:
            return keep
        keep(given)
        return None

    def replace_class(self, target_class, replacement=None, name_map=None, description=None):
        return self._record(PatchType.CLASS_REPLACEMENT, target_class, replacement, description, name_map)

    def override_method(self, target_method, replacement=None, name_map=None, description=None):
        return self._record(PatchType.METHOD_OVERRIDE, target_method, replacement, description, name_map)

    def replace_function(self, target_func, replacement=None, name_map=None, description=None):
        return self._record(PatchType.FUNCTION_REPLACEMENT, target_func, replacement, description, name_map)

    def modify_init(self, target_class, replacement=None, description=None):
        return self._record(PatchType.INIT_MODIFICATION, target_class, replacement, description)

    def adopt_init_modifications(self, other):
        self.patches += [one for one in other.patches if one.patch_type is PatchType.INIT_MODIFICATION]

    def add_import(self, module, names=None, alias=None, is_from_import=True):
        self.additional_imports.append(ImportSpec(module, names, alias, is_from_import))

    def add_helper(self, func=None):
        if func is None:
            return self.add_helper
        self.helpers.append(func)
        return func

    def add_helper_after(self, target, helper=None):
        def keep(thing):
            self.positioned_helpers.append(PositionedHelper(target, thing))
            return thing

        return keep if helper is None else keep(helper)

    def add_post_import_block(self, block):
        self.post_import_blocks.append(block)

    def drop_import_names(self, *names):
        self.drop_imported_names.update(names)

    def exclude_from_output(self, *names):
        self.exclude.extend(names)


def create_patch_from_external(
    target, replacement_module, replacement_name, patch_type=PatchType.CLASS_REPLACEMENT, description=None
):
    source = f"{replacement_module}.{replacement_name}"
    return Patch(patch_type, target, None, replacement_module, description, source)
