"""The public surface: which names, how heavy, and that each resolves."""

import subprocess
import sys

import veomni_hook

NAMES = {
    "Adoption", "Handle", "Kernel", "PatchConfig", "Teacher", "VeomniHookError", "VeomniHookWarning", "activate",
    "adopt", "bind", "create_patch_from_external", "explain", "generate", "linear_cross_entropy", "loss_options",
    "register", "register_kernel", "token_log_probs", "use_kernels", "use_mapped_classes",
}  # fmt: skip

HEAVY = "import sys; import {}; print(sorted(m for m in sys.modules if m in {{'torch', 'transformers', 'dataclasses', 'typing', 'ast', 'inspect', 'tomllib', 'platformdirs'}}))"


def loaded_by(module):
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {HEAVY.format(module)}"], capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout.strip()


def test_the_names():
    assert set(veomni_hook.__all__) == NAMES
    assert set(dir(veomni_hook)) >= NAMES
    assert all(getattr(veomni_hook, name) is not None for name in NAMES)
    assert not hasattr(veomni_hook, "install_everything")


def test_importing_the_package_or_installing_the_hook_loads_nothing_heavy():
    assert loaded_by("veomni_hook") == "[]"
    assert loaded_by("veomni_hook.install") == "[]"


def test_that_test_can_fail():
    assert loaded_by("veomni_hook.errors, ast, dataclasses") != "[]"
